"""One place to tell an event to: metrics.jsonl, the console, and the sinks."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.report.console import Console
from megatrain.report.events import EvalReport, Event, SaveReport, SkipReport, StepReport
from megatrain.report.metrics import MetricsLog
from megatrain.report.sinks import Sink


class Journal:
    """Everybody who listens to a run. Owns the file and the sinks; `close` ends them."""

    def __init__(self, *, console: Console, metrics: MetricsLog, sinks: Sequence[Sink]) -> None:
        self.console = console
        self._metrics = metrics
        self._sinks = sinks

    def write(self, event: Event) -> None:
        self._metrics.write(event)
        for sink in self._sinks:
            sink.write(event)
        match event:
            case StepReport():
                self.console.step(event)
            case SkipReport():
                self.console.skipped(event)
            case EvalReport():
                self.console.evaluated(event)
            case SaveReport():
                self.console.saved(event)

    def sync(self) -> None:
        """What was told so far is on the disk: a checkpoint may count on it."""
        self._metrics.sync()

    def close(self) -> None:
        self._metrics.close()
        for sink in self._sinks:
            sink.close()
