"""When a run ends, and when something is due again."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.errors import RecipeError
from megatrain.train.run import StepLoader
from megatrain.train.state import TrainState
from megatrain.units import Duration

_MOST_COUNTED = 10_000


def total_steps(loader: StepLoader, *, epochs: int | None, steps: int | None) -> int:
    """Steps of the whole run: the epochs' or `steps`, whichever comes first. One of them is given.

    Raises RecipeError for more epochs than can be counted one by one, where they differ.
    """
    if epochs is None:
        assert steps is not None
        return steps
    if loader.even:
        total = epochs * loader.steps_in_epoch(0)
        return total if steps is None else min(total, steps)
    if epochs > _MOST_COUNTED and steps is None:
        raise RecipeError(
            f"{epochs} epochs cannot be counted: packed, with such weights, each has its own number of steps",
            where="train.epochs",
            hint="give train.steps too; whichever comes first ends the run",
        )
    total = 0
    for epoch in range(epochs):
        total += loader.steps_in_epoch(epoch)
        if steps is not None and total >= steps:
            return steps
    return total


def times_due(
    every: Duration | None, *, after: int, total: int, steps_in_epoch: Callable[[int], int], most: int
) -> int | None:
    """How often something is due at steps above `after` and below `total`, and once at `total`; counted up to `most`.

    None where only the clock knows. steps_in_epoch: by the epoch's number.
    """
    if after >= total:
        return 0
    match every:
        case None:
            return 1
        case Duration(value=value, unit="steps"):
            return min(most, (total - 1) // int(value) - after // int(value) + 1)
        case Duration(value=value, unit="epochs"):
            times, end = 1, 0
            for epoch in range(_MOST_COUNTED):
                end += steps_in_epoch(epoch)
                if end >= total or times >= most:
                    break
                times += end > after and (epoch + 1) % value == 0
            return min(most, times)
    return None


class Interval:
    """Every so many steps or epochs, counted from the start of training, or seconds since the last time.

    Steps and epochs are absolute (every 100 steps: 100, 200, ...), so an interruption shifts nothing.
    """

    def __init__(self, every: Duration | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._clock = clock
        self._last_s = clock()

    def due(self, state: TrainState) -> bool:
        """Asked once after each step."""
        match self._every:
            case None:
                return False
            case Duration(value=value, unit="steps"):
                return state.step % value == 0
            case Duration(value=value, unit="epochs"):
                return state.index == 0 and state.epoch % value == 0
            case Duration(value=value):
                return self._clock() - self._last_s >= value

    def restart(self) -> None:
        """It was done now, for whatever reason; only intervals in time care."""
        self._last_s = self._clock()
