"""The learning rate of step k of S: warm-up, then a schedule. Steps count from 1 and none has learning rate 0."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Literal, assert_never

from megatrain.errors import RecipeError

Schedule = Literal["constant", "linear", "cosine", "wsd"]

WSD_DECAY_SHARE = 5
"""wsd decays over the last ceil(S / 5) steps."""


def warmup_steps(warmup: float, *, total: int) -> int:
    """Steps of warm-up: a share of `total` if below 1, else steps. Raises RecipeError if there are more than `total`.

    The share is taken as the decimal number that was typed: 0.07 of 100 steps is 7, not ceil(7.000000000000001).
    """
    steps = math.ceil(Decimal(repr(float(warmup))) * total) if warmup < 1 else math.ceil(warmup)
    if steps > total:
        raise RecipeError(
            f"the warm-up takes {steps} steps, but the run has {total}",
            hint="lower optimizer.warmup (a share of the steps if below 1, else a number of steps)",
            where="optimizer.warmup",
        )
    return steps


def learning_rate(
    k: int, *, total: int, lr: float, warmup: float, schedule: Schedule, min_lr_ratio: float = 0.0
) -> float:
    """Learning rate of step `k` (1-based) of `total`.

    lr*k/W during the W steps of warm-up; then lr*(r + (1-r)*f), r = min_lr_ratio, with f falling from 1 by `schedule`.
    Raises ValueError for a step outside 1..total, RecipeError for a warm-up longer than the run.
    """
    if not 1 <= k <= total:
        raise ValueError(f"step {k} is not one of the steps 1..{total}")
    warm = warmup_steps(warmup, total=total)
    if k <= warm:
        return lr * k / warm
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * _shape(k - 1, total=total, warm=warm, schedule=schedule))


def _shape(done: int, *, total: int, warm: int, schedule: Schedule) -> float:
    """The factor f after `done` steps, warm <= done < total."""
    progress = (done - warm) / (total - warm)
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return (1 + math.cos(math.pi * progress)) / 2
        case "wsd":
            decay = math.ceil(total / WSD_DECAY_SHARE)
            return 1 - max(0, done - (total - decay)) / decay
    assert_never(schedule)
