"""When a run ends, and when something is due again."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatrain.train.run import StepLoader
from megatrain.train.state import TrainState
from megatrain.units import Duration


def total_steps(loader: StepLoader, *, epochs: int | None, steps: int | None) -> int:
    """Steps of the whole run: the epochs' or `steps`, whichever comes first. One of them is given."""
    if epochs is None:
        assert steps is not None
        return steps
    total = 0
    for epoch in range(epochs):
        total += loader.steps_in_epoch(epoch)
        if steps is not None and total >= steps:
            return steps
    return total


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
