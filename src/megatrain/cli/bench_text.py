"""What ``megatrain bench`` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain.report.trace import picture
from megatrain.units import format_size

if TYPE_CHECKING:
    from megatrain.train.baselines.runner import Baseline
    from megatrain.train.bench_report import BenchReport, StepTrace

_HELD_BY = {
    "compute": "compute",
    "optimizer": "the optimizer",
    "link": "the link",
    "launches": "launches: the host enqueues kernels no faster; more rows at once make them longer",
}
_COLOURS = {"fetch": "36", "compute": "32", "send": "35", "optimizer": "33"}


def report_text(report: BenchReport) -> str:
    """The findings, a line for each question."""
    return "\n".join((_work(report), _speed(report), _bound(report), _waits(report), _memory(report), _start(report)))


def trace_text(trace: StepTrace, *, coloured: bool) -> str:
    """One step as a picture, a line per lane."""
    rows = picture(trace.spans, start_s=trace.start_s, end_s=trace.end_s).splitlines()
    return "\n".join(_coloured(row) if coloured else row for row in rows)


def _coloured(row: str) -> str:
    """The row in the colour of the lane that it begins with; the scale stays as it is."""
    code = next((code for lane, code in _COLOURS.items() if row.startswith(lane)), None)
    return row if code is None else f"\x1b[{code}m{row}\x1b[0m"


def baseline_table(others: Sequence[Baseline], *, report: BenchReport) -> str:
    """Who did the same work how fast, and in how much memory."""
    lines = [f"{'':10} {'step':>9} {'tok/s':>9} {'ours':>8} {'VRAM':>10} {'host':>10}"]
    lines.append(
        _row("megatrain", step_s=report.step_s, tokens_per_s=report.tokens_per_s, ratio="")
        + f" {_size(report.vram_peak_bytes):>10} {_size(report.host_peak_bytes):>10}"
    )
    for other in others:
        if other.tokens_per_s is None:
            lines.append(f"{other.name:10} {other.failure}")
            continue
        ratio = f"{report.tokens_per_s / other.tokens_per_s:.2f} x"
        lines.append(
            _row(other.name, step_s=other.seconds, tokens_per_s=other.tokens_per_s, ratio=ratio)
            + f" {_size(other.vram_peak_bytes):>10} {_size(other.host_peak_bytes):>10}"
        )
    if report.data != "random tokens":
        lines.append("the others ran full rows of random tokens")
    return "\n".join(lines)


def _row(name: str, *, step_s: float, tokens_per_s: float, ratio: str) -> str:
    return f"{name:10} {step_s:>7.3f} s {tokens_per_s:>9,.0f} {ratio:>8}"


def _work(report: BenchReport) -> str:
    used = report.tokens_per_step / report.positions_per_step
    padding = f", {1 - used:.0%} of the positions padding" if used < 0.995 else ""
    spare = [f"{report.resident} units resident"] if report.resident else []
    spare += [f"{report.kept} layers kept"] if report.kept else []
    spare += [f"attention kept on the {report.attention}"] if report.attention else []
    spare += [f"the head in {report.head_slices} slices"] if report.head_slices else []
    spare += [f"experts in {report.expert_groups} groups"] if report.expert_groups else []
    spare += [f"MLPs in tiles of {report.tile_tokens} tokens"] if report.tile_tokens else []
    return (
        f"{report.device}: {_count(report.params_total)} parameters, {report.tokens_per_step:,} tokens a step "
        f"({report.micro_batches} x {report.micro_batch} x {report.seq_len}, {report.data}{padding}), "
        + ", ".join([f"activations on the {report.activations}", f"{report.slots} slots", *spare])
    )


def _speed(report: BenchReport) -> str:
    mfu = f", {report.mfu:.1%} of {report.peak_tflops:,.0f}" if report.mfu is not None else ""
    return (
        f"step {report.step_s:.3f} s ({report.step_s_min:.3f}-{report.step_s_max:.3f})   "
        f"{report.tokens_per_s:,.0f} tok/s   {report.tflops:.3g} TFLOP/s{mfu} "
        f"(6 N + causal attention, no recompute)"
    )


def _bound(report: BenchReport) -> str:
    text = f"held by {_HELD_BY[report.bound_by]}"
    if report.light_s is None or report.light_share is None:
        return text
    return f"{text}; speed of light {report.light_s:.3f} s ({report.light_by}), the step is at {report.light_share:.0%}"


def _waits(report: BenchReport) -> str:
    rates = (("fetch", report.fetch_bytes_per_s), ("send", report.send_bytes_per_s))
    inside = [f"{lane} {rate / 1e9:.1f} GB/s inside copies" for lane, rate in rates if rate is not None]
    return "; ".join(
        (
            f"optimizer {report.optimizer_s:.3f} s, exposed {report.exposed_optimizer_s:.3f} s",
            f"exposed transfers {report.exposed_transfer_s:.3f} s",
            *inside,
            f"compute busy {report.compute_busy_share:.1%}",
        )
    )


def _memory(report: BenchReport) -> str:
    host = (
        f"host {format_size(report.host_peak_bytes)} (planned {format_size(report.host_planned_bytes)}, "
        f"{report.host_bytes_per_parameter:.2f} B/parameter)"
    )
    if not report.vram_peak_bytes:
        return host
    counted = "" if report.vram_driver_bytes is not None else ", pool and context: the driver tells no count"
    planned = format_size(report.vram_planned_bytes)
    full = ""
    if report.vram_given_back:
        full = f"; too full: PyTorch gave memory back and took it anew {report.vram_given_back} times while measured"
    return f"VRAM {format_size(report.vram_peak_bytes)} (planned {planned}{counted}){full}; {host}"


def _start(report: BenchReport) -> str:
    return f"built in {report.build_s:.1f} s, warm-up {report.warmup_s:.1f} s"


def _count(parameters: int) -> str:
    """'1.05 M', '8.03 B'."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"
