"""What is said of steps that are not finite, and when they are too many."""

from __future__ import annotations

import math

from megatrain.errors import NonFinite
from megatrain.stream.step import StepNumbers
from megatrain.train.locate import Fault
from megatrain.train.state import TrainState

SKIPS = 25
"""Steps that are not finite, one after the other, after which it is the weights and not the data."""


def describe(numbers: StepNumbers, *, fault: Fault) -> str:
    """Which number it is, and where it came from."""
    if math.isfinite(numbers.loss):
        return f"the gradient norm is {numbers.grad_norm}, {fault}"
    return f"the loss is {numbers.loss}, {fault}"


def stopped(reason: str, *, state: TrainState, step: int) -> NonFinite:
    """Under `nonfinite: stop`. state: the last that was trained."""
    kept = f"the state after step {state.step} is saved" if state.step else "nothing was trained yet"
    return NonFinite(
        f"{reason}; no weight was touched, and {kept}",
        where=f"step {step} (step {state.index + 1} of epoch {state.epoch + 1})",
        hint="lower optimizer.lr, look at these rows, or go on without such steps: train.nonfinite=skip",
    )


def too_many(skips: int, *, state: TrainState, total_steps: int) -> bool:
    """Under `nonfinite: skip`. skips: since the last finite step."""
    return skips == SKIPS or state.skipped_steps == total_steps


def given_up(reason: str, *, skips: int, step: int) -> NonFinite:
    return NonFinite(
        f"{reason}; so it was in {skips} steps one after the other, and none of them touched a weight",
        where=f"step {step}",
        hint="the weights may not be finite themselves: lower optimizer.lr, and start from an earlier checkpoint",
    )
