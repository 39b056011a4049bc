"""Page-locking that fails after so many bytes, as under WSL2 or with a limit, on a runtime that only says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from megatrain.host import arena as arena_module
from megatrain.host.arena import Arena, footprint

BLOCK = 1 << 20


class Runtime:
    """CUDA's, as far as page-locking goes: it locks `limit` bytes and has an error state."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}
        self.asked = 0
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked += 1
        if sum(self.locked.values()) + nbytes > self.limit:
            self.last_error = 2
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaError(self, code: int) -> SimpleNamespace:
        return SimpleNamespace(code=code)

    def cudaGetErrorString(self, error: SimpleNamespace) -> str:
        return {2: "out of memory"}[error.code]


def runtime_of(monkeypatch: pytest.MonkeyPatch, *, limit: int) -> Runtime:
    runtime = Runtime(limit)
    monkeypatch.setattr(arena_module, "_cudart", lambda: runtime)
    monkeypatch.setattr(arena_module, "_clear_cuda_error", lambda: setattr(runtime, "last_error", 0))
    return runtime


def test_the_rest_is_pageable_the_cause_is_named_and_no_error_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = runtime_of(monkeypatch, limit=2 * footprint(BLOCK, pinned=True))
    arena = Arena(pinned_bytes=5 * footprint(BLOCK, pinned=True), pageable_bytes=0, threads=1, pin=True)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        blocks = [arena.take(BLOCK, pinned=True) for _ in range(5)]
    for block in blocks:  # all of them are memory
        block.fill_(3)
    assert arena.report.locked_bytes == 2 * footprint(BLOCK, pinned=True)
    assert arena.pinned_fraction == pytest.approx(2 / 5)
    assert runtime.asked == 3, "what failed once is not tried again"
    assert runtime.last_error == 0
    assert arena.report.failure == "page-locking failed after 0.00 GiB: out of memory (CUDA error 2)"
    assert caplog.text.count(arena.report.failure) == 1
    arena.close()
    assert runtime.locked == {}


def test_a_block_is_locked_in_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """129.5 MiB are 129.5 MiB: no power of two, no second copy."""
    size = (129 << 20) + (512 << 10)
    runtime = runtime_of(monkeypatch, limit=1 << 40)
    arena = Arena(pinned_bytes=footprint(size, pinned=True), pageable_bytes=0, threads=2, pin=True)
    arena.take(size, pinned=True)
    assert list(runtime.locked.values()) == [size]
    assert size <= arena.report.total_bytes < 1.02 * size
