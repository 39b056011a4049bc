"""Rates of a CUDA device's link, measured: for `megatrain doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

REPEATS = 3


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second, best of a few copies."""

    into: float  # host -> device, page-locked
    out: float
    duplex: float  # each way, both at once
    pageable_into: float


def measure_link(device: torch.device, *, locked: tuple[Tensor, Tensor], pageable: Tensor) -> LinkRates:
    """Copy blocks of one size both ways. locked: two page-locked uint8 blocks, pageable: one that is not."""
    nbytes = locked[0].numel()
    there, back = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    fetch, send = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def into() -> None:
        with torch.cuda.stream(fetch):
            there.copy_(locked[0], non_blocking=True)

    def out() -> None:
        with torch.cuda.stream(send):
            locked[1].copy_(back, non_blocking=True)

    def both() -> None:
        into()
        out()

    def from_pageable() -> None:
        there[: pageable.numel()].copy_(pageable)

    return LinkRates(
        into=nbytes / _best_s(device, into),
        out=nbytes / _best_s(device, out),
        duplex=nbytes / _best_s(device, both),
        pageable_into=pageable.numel() / _best_s(device, from_pageable),
    )


def _best_s(device: torch.device, copy: Callable[[], None]) -> float:
    times = []
    for _ in range(1 + REPEATS):  # the first wakes the link up
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def allocated_peak_bytes(device: torch.device) -> int:
    """Peak of what tensors took of PyTorch's pool."""
    return int(torch.cuda.max_memory_allocated(device))
