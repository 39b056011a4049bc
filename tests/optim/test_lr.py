from __future__ import annotations

import math

import pytest

from megatrain.errors import RecipeError
from megatrain.optim.lr import Schedule, learning_rate, warmup_steps

SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine", "wsd")


def rates(schedule: Schedule, *, total: int, warmup: float = 0.0, lr: float = 1.0, ratio: float = 0.0) -> list[float]:
    return [
        learning_rate(k, total=total, lr=lr, warmup=warmup, schedule=schedule, min_lr_ratio=ratio)
        for k in range(1, total + 1)
    ]


def test_schedules_without_warmup_by_hand() -> None:
    assert rates("constant", total=3) == [1.0, 1.0, 1.0]
    assert rates("linear", total=4) == [1.0, 0.75, 0.5, 0.25]
    assert rates("cosine", total=4) == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    # D = ceil(6 / 5) = 2: four full steps, then the fifth at 1 - 0/2 and the sixth at 1 - 1/2
    assert rates("wsd", total=6) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]


def test_warmup_rises_to_the_full_rate_and_the_schedule_starts_there() -> None:
    assert rates("linear", total=8, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates("linear", total=8, warmup=0.5) == rates("linear", total=8, warmup=4)


def test_floor() -> None:
    assert rates("linear", total=4, lr=2.0, ratio=0.5) == [2.0, 1.75, 1.5, 1.25]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 0.03, 0.999, 1, 7])
@pytest.mark.parametrize("total", [7, 8, 100])
def test_no_step_has_rate_zero_and_none_exceeds_the_full_rate(schedule: Schedule, warmup: float, total: int) -> None:
    values = rates(schedule, total=total, warmup=warmup)
    assert all(0 < value <= 1 for value in values)
    peak = max(warmup_steps(warmup, total=total), 1)
    assert values[peak - 1] == 1.0
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)


def test_share_is_the_decimal_that_was_typed() -> None:
    assert 0.07 * 100 > 7  # what binary rounding would make of it
    assert warmup_steps(0.07, total=100) == 7
    assert warmup_steps(0.03, total=10) == 1
    assert warmup_steps(0.0, total=10) == 0


def test_warmup_longer_than_the_run_is_refused_with_its_key() -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.warmup: the warm-up takes 11 steps, but the run has 10"):
        learning_rate(1, total=10, lr=1.0, warmup=11, schedule="cosine")


@pytest.mark.parametrize("k", [0, 11])
def test_step_outside_the_run(k: int) -> None:
    with pytest.raises(ValueError, match="is not one of the steps"):
        learning_rate(k, total=10, lr=1.0, warmup=0, schedule="cosine")
