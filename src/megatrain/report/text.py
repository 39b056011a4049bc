"""Numbers as people read them, and the one-line forms of the events."""

from __future__ import annotations

from megatrain.report.events import EvalReport, SaveReport, SkipReport, StepReport
from megatrain.units import format_size


def clock(seconds: float) -> str:
    """A span of time: '0:42', '1:02:03', '2d 03:04'."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}:{m:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def step_line(report: StepReport, *, total_steps: int, eta_s: float) -> str:
    aux = f"  aux {report.aux_loss:.4f}" if report.aux_loss is not None else ""
    return (
        f"step {report.step}/{total_steps}  loss {report.loss:.4f}{aux}  lr {report.lr:.2e}"
        f"  grad norm {report.grad_norm:.3f}  {report.tokens_per_s:,.0f} tok/s  {report.step_s:.2f} s"
        f"  left {clock(eta_s)}"
    )


def skip_line(report: SkipReport) -> str:
    return f"step {report.step}: {report.reason}; the step was skipped and touched no weight"


def eval_line(report: EvalReport) -> str:
    return (
        f"eval after step {report.step}  loss {report.loss:.4f}  perplexity {report.perplexity:.2f}"
        f"  {report.supervised_tokens:,} tokens  {report.eval_s:.1f} s"
    )


def save_line(report: SaveReport) -> str:
    return f"saved {report.path}  {format_size(report.bytes)}  {report.save_s:.1f} s  waited for {report.stall_s:.1f} s"
