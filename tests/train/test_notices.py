"""What a run is told once on its way."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatrain.stream.device import CpuDevice
from megatrain.train.notices import SETTLED, Notices


class FullDevice(CpuDevice):
    """Gives memory back as often in each step as it is told."""

    def __init__(self, times: Sequence[int]) -> None:
        super().__init__()
        self._times, self._total = list(times), 0

    def memory_given_back(self) -> int:
        if self._times:
            self._total += self._times.pop(0)
        return self._total


def told(times: Sequence[int], *, rows: int = 4, first_step: int = 0) -> list[str]:
    """`times` are of the steps from the third on."""
    said: list[str] = []
    notices = Notices(
        cast("Any", SimpleNamespace(warn=said.append, note=said.append)),
        device=FullDevice(times),
        plan=cast("Any", SimpleNamespace(micro_batch=rows)),
        saves=True,
        first_step=first_step,
    )
    for step in range(first_step + 1, first_step + SETTLED + len(times)):
        notices.after(step, step_s=1.0, steps_left=0)
    return said


def test_what_is_given_back_before_the_steps_are_steady_is_not_told() -> None:
    assert told([9, 0, 0, 0]) == []


@pytest.mark.parametrize("first_step", [0, 100])
def test_a_device_that_is_too_full_is_told_once(first_step: int) -> None:
    (said,) = told([5, 0, 8, 8, 8], first_step=first_step)
    assert said.startswith(f"step {first_step + 5}: the device is so full")
    assert "8 times in this step" in said
    assert "memory.micro_batch: 3" in said


def test_one_row_cannot_be_fewer() -> None:
    (said,) = told([0, 1], rows=1)
    assert "memory.vram" in said
    assert "memory.micro_batch" not in said
