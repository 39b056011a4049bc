"""A note when the loss leaves its usual range; it changes nothing."""

from __future__ import annotations

import math
import statistics
from collections import deque

_WINDOW = 64
_LEAST = 16  # losses before anything is called unusual
_DEVIATIONS = 8.0
_SCALE = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_FLOOR = 0.05  # of the median: losses that hardly vary make no spikes of nothing


class LossWatch:
    """The last losses of this process. Spikes are among them: a level that stays is soon the usual one."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def exceeded(self, loss: float) -> float | None:
        """The threshold that `loss` exceeds, or None: the median of the last 64 losses, and eight times their spread.

        The spread is 1.4826 times the median absolute deviation, at least 5 % of the median.
        """
        threshold = None
        if len(self._losses) >= _LEAST:
            median = statistics.median(self._losses)
            spread = _SCALE * statistics.median(abs(x - median) for x in self._losses)
            threshold = median + _DEVIATIONS * max(spread, _FLOOR * abs(median))
        if math.isfinite(loss):
            self._losses.append(loss)
        return threshold if threshold is not None and loss > threshold else None
