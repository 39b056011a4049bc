"""Fixtures of the optimizer room: the kernel, compiled from the sources as they are now, and small host stores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from optim_store import small_anatomy

from megatrain.host.store import HostStore
from megatrain.optim.kernel import Isa, Kernel, load_library
from megatrain.optim.kernel.build import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load_library(build(tmp_path_factory.mktemp("kernel")))


@pytest.fixture
def kernel_of(library: ctypes.CDLL) -> Iterator[Callable[..., Kernel]]:
    """Makes kernels that are closed with the test."""
    made: list[Kernel] = []

    def make(*, threads: int = 1, isa: Isa | None = None) -> Kernel:
        made.append(Kernel(library, threads=threads, isa=isa))
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()


@pytest.fixture
def store_of() -> Iterator[Callable[..., HostStore]]:
    """Makes stores with random masters; the same seed gives the same store."""
    made: list[HostStore] = []

    def make(
        dtype: torch.dtype,
        *,
        layers: int = 2,
        unused: frozenset[str] = frozenset(),
        moments: torch.dtype = torch.float32,
    ) -> HostStore:
        anatomy = small_anatomy(dtype, layers=layers, unused=unused)
        store = HostStore.allocate(anatomy, pin=False, threads=1, moments=moments)
        generator = torch.Generator().manual_seed(7)
        for host in store.units:
            for entry in host.unit.layout.params:
                host.set_master(entry, torch.randn(entry.shape, generator=generator))
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()
