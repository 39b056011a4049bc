"""The display on a terminal: events scroll by above, the state of the run stays below."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatrain.report.console import Pace
from megatrain.report.events import EvalReport, SaveReport, SkipReport, StepReport
from megatrain.report.text import clock, eval_line, save_line, skip_line
from megatrain.units import format_size


class LiveConsole:
    """Redraws a small panel in place; see Console for what the methods mean."""

    def __init__(self, stream: TextIO) -> None:
        self._console = RichConsole(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._pace = Pace(first_step=1, total_steps=0)
        self._total_steps = 0
        self._last_eval: EvalReport | None = None
        self._live.start()

    def phase(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def progress(self, text: str, *, done: int, total: int) -> None:
        bar, whole = Table.grid(padding=(0, 1)), max(1, total)
        bar.add_row(text, ProgressBar(total=whole, completed=done, width=40), f"{100 * done // whole} %")
        self._show(bar if done < total else Text(""))

    def note(self, text: str) -> None:
        self._print(Text(text))

    def warn(self, text: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), text))

    def begin(self, *, first_step: int, total_steps: int) -> None:
        self._pace = Pace(first_step=first_step, total_steps=total_steps)
        self._total_steps = total_steps
        self._show(Text(f"step {first_step} of {total_steps} is running", style="dim"))

    def step(self, report: StepReport) -> None:
        self._show(self._panel(report))

    def skipped(self, report: SkipReport) -> None:
        self.warn(skip_line(report))

    def evaluated(self, report: EvalReport) -> None:
        self._last_eval = report
        self._print(Text(eval_line(report), style="cyan"))

    def saved(self, report: SaveReport) -> None:
        self._print(Text(save_line(report), style="green"))

    def close(self) -> None:
        self._live.update(Text(""))
        self._live.stop()

    def _panel(self, report: StepReport) -> RenderableType:
        left = clock(self._pace.left_s(report))
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(f"step {report.step}/{self._total_steps}", style="bold"),
            ProgressBar(total=max(1, self._total_steps), completed=report.step, width=36),
            Text(f"epoch {report.epoch:.2f}  left {left}", style="dim"),
        )
        facts = {
            "loss": f"{report.loss:.4f}",
            "lr": f"{report.lr:.2e}",
            "grad norm": f"{report.grad_norm:.3f}",
            "tok/s": f"{report.tokens_per_s:,.0f}",
        }
        if report.aux_loss is not None:
            facts["aux"] = f"{report.aux_loss:.4f}"
        if self._last_eval is not None:
            facts["eval"] = f"{self._last_eval.loss:.4f}"
        machine = {
            "step": f"{report.step_s:.2f} s",
            "bound by": f"{report.bound_by} ({_distance(report)})",
            "host": format_size(report.host_peak_bytes),
        }
        if report.vram_peak_bytes:
            machine["vram"] = format_size(report.vram_peak_bytes)
        return Group(head, _facts(facts), _facts(machine))

    def _show(self, what: RenderableType) -> None:
        self._live.update(what, refresh=True)

    def _print(self, text: Text) -> None:
        self._live.console.print(text)


def _distance(report: StepReport) -> str:
    """How far from the machine's limit, or where that is not known, how much of the step computed."""
    if report.limit_share is None:
        return f"{100 * report.compute_share:.0f} % computing"
    return f"{100 * report.limit_share:.0f} % of the machine's limit"


def _facts(facts: dict[str, str]) -> Text:
    line = Text("  ", no_wrap=True, overflow="ellipsis")
    for name, value in facts.items():
        line.append(f"{name} ", style="dim")
        line.append(f"{value}   ")
    return line
