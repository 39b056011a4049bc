"""What a person sees while it runs. Everything goes to stderr; stdout belongs to results.

Three ways of telling the same story: a live display on a terminal, plain lines elsewhere (logs, pipes,
``NO_COLOR``), and with ``--quiet`` only what needs attention.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from megatrain.report.events import EvalReport, SaveReport, SkipReport, StepReport
from megatrain.report.text import eval_line, save_line, skip_line, step_line

_PROGRESS_S = 5.0  # between two lines of progress in a log


class Console(Protocol):
    """The listener. `close` gives the terminal back; it may be called twice."""

    def phase(self, text: str) -> None:
        """Something that may take a while begins."""

    def progress(self, text: str, *, done: int, total: int) -> None:
        """The current phase has come this far, in any unit."""

    def note(self, text: str) -> None:
        """A fact worth keeping in the log."""

    def warn(self, text: str) -> None:
        """Something is not as it should be, and the run goes on."""

    def begin(self, *, first_step: int, total_steps: int) -> None:
        """Training starts; `first_step` is the first that will be taken."""

    def step(self, report: StepReport) -> None: ...
    def skipped(self, report: SkipReport) -> None: ...
    def evaluated(self, report: EvalReport) -> None: ...
    def saved(self, report: SaveReport) -> None: ...
    def close(self) -> None: ...


class Pace:
    """Time left, from a running mean of the steps so far; the first step (warm-up, compilation) counts until a
    second one is known."""

    def __init__(self, *, first_step: int, total_steps: int) -> None:
        self._first = first_step
        self._total = total_steps
        self._mean_s: float | None = None

    def left_s(self, report: StepReport) -> float:
        if self._mean_s is None or report.step <= self._first + 1:
            self._mean_s = report.step_s
        else:
            self._mean_s += 0.1 * (report.step_s - self._mean_s)
        return self._mean_s * (self._total - report.step)


class PlainConsole:
    """One line per event, no escape codes. Progress is a tenth at a time, and silent while nothing takes long."""

    def __init__(self, stream: TextIO, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._told_s = now()
        self._pace = Pace(first_step=1, total_steps=0)
        self._total_steps = 0
        self._told_tenth = 0

    def phase(self, text: str) -> None:
        self._told_tenth = 0
        self._say(text)

    def progress(self, text: str, *, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if done == 0:
            self._told_tenth = 0
        if self._told_tenth < tenth < 10 and self._now() - self._told_s >= _PROGRESS_S:
            self._told_tenth = tenth
            self._say(f"{text}: {10 * tenth} %")

    def note(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def begin(self, *, first_step: int, total_steps: int) -> None:
        self._pace = Pace(first_step=first_step, total_steps=total_steps)
        self._total_steps = total_steps

    def step(self, report: StepReport) -> None:
        self._say(step_line(report, total_steps=self._total_steps, eta_s=self._pace.left_s(report)))

    def skipped(self, report: SkipReport) -> None:
        self.warn(skip_line(report))

    def evaluated(self, report: EvalReport) -> None:
        self._say(eval_line(report))

    def saved(self, report: SaveReport) -> None:
        self._say(save_line(report))

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        self._told_s = self._now()
        print(text, file=self._stream, flush=True)


class QuietConsole(PlainConsole):
    """Warnings only."""

    def _say(self, text: str) -> None:
        if text.startswith("warning: "):
            super()._say(text)


def colours(stream: TextIO) -> bool:
    """Whether escape codes may go to `stream`: a terminal, and NO_COLOR not set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def open_console(*, quiet: bool) -> Console:
    """The console that fits where stderr goes."""
    if quiet:
        return QuietConsole(sys.stderr)
    if colours(sys.stderr):
        from megatrain.report.live import LiveConsole

        return LiveConsole(sys.stderr)
    return PlainConsole(sys.stderr)
