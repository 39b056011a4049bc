"""Which resource holds a step; the driver's table."""

from __future__ import annotations

import pytest

from megatrain.report.bound import bound_by
from megatrain.report.process import vram_of


@pytest.mark.parametrize(
    ("step_s", "optimizer_s", "exposed_optimizer_s", "exposed_transfer_s", "who"),
    [
        (5.963, 1.456, 0.136, 0.029, "compute"),  # 7B, 64k tokens: only the beginning of the update is exposed
        (2.686, 1.510, 1.201, 0.031, "optimizer"),  # 7B, 16k tokens: the forward is as long as the update
        (1.318, 0.754, 0.604, 0.027, "optimizer"),
        (1.0, 0.1, 0.01, 0.7, "link"),
        (1.0, 0.0, 0.0, 0.0, "compute"),
        (3.0, 1.0, 0.9, 0.1, "compute"),  # the update is followed, and yet most of the step is the backward
    ],
)
def test_bound_by(
    step_s: float, optimizer_s: float, exposed_optimizer_s: float, exposed_transfer_s: float, who: str
) -> None:
    found = bound_by(
        step_s=step_s,
        optimizer_s=optimizer_s,
        exposed_optimizer_s=exposed_optimizer_s,
        exposed_transfer_s=exposed_transfer_s,
    )
    assert found == who


@pytest.mark.parametrize(
    ("step_s", "exposed_optimizer_s", "waited_s", "who"),
    [
        (6.6, 0.0, 0.001, "launches"),  # done as soon as the last kernel was enqueued
        (2.7, 0.0, 0.31, "compute"),
        (2.7, 0.0, None, "compute"),  # a CPU enqueues nothing
        (0.05, 0.0, 0.012, "compute"),  # a quarter of a short step
        (2.0, 1.9, 0.001, "optimizer"),
    ],
)
def test_a_device_that_is_done_with_the_host_waited_for_it(
    step_s: float, exposed_optimizer_s: float, waited_s: float | None, who: str
) -> None:
    found = bound_by(
        step_s=step_s,
        optimizer_s=2 * exposed_optimizer_s,
        exposed_optimizer_s=exposed_optimizer_s,
        exposed_transfer_s=0.0,
        waited_s=waited_s,
    )
    assert found == who


def test_the_drivers_count_is_that_of_one_process_over_all_gpus() -> None:
    table = "100, 512\n7, 1024\n7, 2048\n8, [N/A]\nnonsense\n"
    assert vram_of(table, pid=7) == 3 << 30
    assert vram_of(table, pid=8) is None
    assert vram_of("", pid=7) is None
