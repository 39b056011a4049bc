"""Page-locking for real: what is locked copies fast, what fails is named and leaves CUDA as it was."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatrain.host import arena as arena_module
from megatrain.host.arena import Arena
from megatrain.host.arena import footprint as arena_footprint

BLOCK = 300 << 20


def test_pinned_blocks_are_page_locked_and_others_are_not() -> None:
    arena = Arena(pinned_bytes=2 * arena_footprint(BLOCK + 5, pinned=True), pageable_bytes=4096, threads=4, pin=True)
    blocks = [arena.take(BLOCK + 5, pinned=True), arena.take(4000, pinned=False), arena.take(BLOCK + 5, pinned=True)]
    assert [b.is_pinned() for b in blocks] == [True, False, True]
    assert arena.pinned_fraction == 1.0
    assert arena.report.locked_bytes == 2 * arena_footprint(BLOCK + 5, pinned=True)
    for value, block in enumerate(blocks, 1):  # first, last and middle bytes make the trip there and back
        block.fill_(value)
        there = block.to("cuda", non_blocking=True)
        block.zero_() if not block.is_pinned() else None
        torch.cuda.synchronize()
        assert bool((there == value).all())
        block.copy_(there + 1, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((block == value + 1).all())
    arena.close()
    assert not blocks[0].is_pinned()


def test_the_same_addresses_can_be_locked_again() -> None:
    for _ in range(3):
        arena = Arena(pinned_bytes=BLOCK, pageable_bytes=0, threads=4, pin=True)
        block = arena.take(BLOCK, pinned=True)
        assert block.is_pinned()
        arena.close()
        del block, arena


class SecondFails:
    """The CUDA runtime, with a second registration that fails as a driver's limit does: out of memory."""

    def __init__(self, real: Any) -> None:
        self._real, self._calls = real, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        self._calls += 1
        if self._calls == 2:
            return self._real.cudaHostRegister(0, nbytes, flags)  # really fails: invalid value
        return self._real.cudaHostRegister(address, nbytes, flags)


def test_failure_of_the_second_block_leaves_the_rest_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.zeros(1, device="cuda")
    runtime = SecondFails(torch.cuda.cudart())
    monkeypatch.setattr(arena_module, "_cudart", lambda: runtime)
    arena = Arena(pinned_bytes=3 * BLOCK, pageable_bytes=0, threads=4, pin=True)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        blocks = [arena.take(BLOCK, pinned=True) for _ in range(3)]
    assert [b.is_pinned() for b in blocks] == [True, False, False]
    assert arena.pinned_fraction == pytest.approx(1 / 3)
    assert "page-locking failed after 0.29 GiB" in caplog.text
    assert arena.report.failure
    assert arena.report.failure in caplog.text
    # the error is not left behind for the next kernel to report
    assert int(torch.zeros(1000, device="cuda").add_(1).sum()) == 1000
    blocks[2].fill_(7)
    assert bool((blocks[2].to("cuda") == 7).all())
    arena.close()
