"""What a run is told once on its way."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatrain.stream.device import CpuDevice
from megatrain.train.notices import Notices


class FullDevice(CpuDevice):
    """Has given memory back so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def memory_given_back(self) -> int:
        return self.times


def told(times: Sequence[int], *, rows: int = 4, first_step: int = 0, between: int = 0) -> list[str]:
    """times: in each step; between: before each, as an evaluation does."""
    said: list[str] = []
    device = FullDevice()
    notices = Notices(
        cast("Any", SimpleNamespace(warn=said.append, note=said.append)),
        device=device,
        plan=cast("Any", SimpleNamespace(micro_batch=rows)),
        saves=True,
        first_step=first_step,
    )
    for step, more in enumerate(times, start=first_step + 1):
        device.times += between
        notices.before()
        device.times += more
        notices.after(step, step_s=1.0, steps_left=0)
    return said


@pytest.mark.parametrize("times", [[9, 9, 0, 0, 0], [0, 0, 7, 0, 7, 0], [9, 9, 9]])
def test_what_does_not_go_on_is_not_told(times: list[int]) -> None:
    assert told(times) == []


def test_what_evaluations_did_is_not_told() -> None:
    assert told([0] * 8, between=7) == []


@pytest.mark.parametrize("first_step", [0, 100])
def test_a_device_that_is_too_full_is_told_once(first_step: int) -> None:
    (said,) = told([5, 0, 0, 8, 8, 8, 8], first_step=first_step, between=3)
    assert said.startswith(f"step {first_step + 5}: the device is so full")
    assert "8 times in this step" in said
    assert "memory.micro_batch: 3" in said


def test_one_row_cannot_be_fewer() -> None:
    (said,) = told([0, 0, 1, 1], rows=1)
    assert "memory.vram" in said
    assert "memory.micro_batch" not in said
