"""``megatrain bench``: measured steps of a recipe, or of a bare architecture, on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.cli.output import emit
from megatrain.errors import UsageError
from megatrain.recipe import Recipe, load_recipe
from megatrain.report.trace import busy_s, copy_rate, picture, write_chrome_trace
from megatrain.units import format_size

if TYPE_CHECKING:
    from megatrain.train.baselines.runner import Baseline
    from megatrain.train.bench import BenchReport, StepTrace

DEFAULT_STEPS = 5
BARE_RECIPE = """\
model: {{path: {path}, init: random}}
data: {{train: synthetic, max_seq_len: 1024, packing: false}}
train: {{batch_size: 16}}
output: {{dir: bench}}
"""


def run(
    recipe: str | None,
    *,
    model: str | None,
    overrides: Sequence[str],
    steps: int | None,
    tokens_per_step: int | None,
    baseline: str | None,
    trace: Path | None,
    json: bool,
) -> int:
    """Measure and print; returns the exit code."""
    chosen = _recipe(recipe, model=model, overrides=overrides, tokens_per_step=tokens_per_step)
    from megatrain.train.baselines.runner import parse_names, run_baselines
    from megatrain.train.baselines.work import Work
    from megatrain.train.bench import bench
    from megatrain.train.build import model_path, plan_run, read_config

    names = parse_names(baseline) if baseline is not None else ()
    count = steps or DEFAULT_STEPS
    planned = plan_run(chosen, config=read_config(chosen))
    report, steps_trace = bench(planned, steps=count, trace=trace is not None)
    if steps_trace is not None and trace is not None:
        write_chrome_trace(trace, steps_trace.spans)
    planned.device.release_cache()
    work = Work(
        model=model_path(chosen),
        seq_len=planned.plan.seq_len,
        tokens_per_step=report.tokens_per_step,
        micro_batch=planned.plan.micro_batch,
        steps=count,
    )
    others = run_baselines(names, work=work)
    if json:
        emit(report.to_dict() | {"baselines": [_compared(other, report=report) for other in others]})
    else:
        print(_text(report))
        if steps_trace is not None:
            print(picture(steps_trace.spans, start_s=steps_trace.start_s, end_s=steps_trace.end_s))
            print(_rates(steps_trace))
        for other in others:
            print(_line(other, report=report))
    return 0


def _rates(trace: StepTrace) -> str:
    """How fast large copies ran, and how busy the compute stream was."""
    parts = []
    for lane in ("fetch", "send"):
        rate = copy_rate(trace.spans, lane=lane)
        if rate is not None:
            parts.append(f"{lane} {rate / 1e9:.1f} GB/s inside copies")
    share = busy_s(trace.spans, lane="compute") / max(s.end_s for s in trace.spans)
    return "; ".join([*parts, f"compute busy {share:.1%} of two steps"])


def _compared(other: Baseline, *, report: BenchReport) -> dict[str, object]:
    ratio = report.tokens_per_s / other.tokens_per_s if other.tokens_per_s else None
    return {"name": other.name, "failure": other.failure, "ratio": ratio, **other.result}


def _line(other: Baseline, *, report: BenchReport) -> str:
    if other.tokens_per_s is None:
        return f"{other.name}: {other.failure}"
    ratio = report.tokens_per_s / other.tokens_per_s
    return f"{other.name}: {other.tokens_per_s:,.0f} tok/s; megatrain is {ratio:.2f} x as fast"


def _recipe(recipe: str | None, *, model: str | None, overrides: Sequence[str], tokens_per_step: int | None) -> Recipe:
    if (recipe is None) == (model is None):
        raise UsageError("bench takes a RECIPE or --model PATH", hint="for example: megatrain bench quickstart")
    if recipe is not None:
        return _with_tokens(recipe, overrides=overrides, tokens_per_step=tokens_per_step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.yaml")
        path.write_text(BARE_RECIPE.format(path=_quoted(str(model))), encoding="utf-8")
        return _with_tokens(str(path), overrides=overrides, tokens_per_step=tokens_per_step)


def _with_tokens(recipe: str, *, overrides: Sequence[str], tokens_per_step: int | None) -> Recipe:
    loaded = load_recipe(recipe, overrides=overrides)
    if tokens_per_step is None:
        return loaded
    length = loaded.data.max_seq_len
    if tokens_per_step % length:
        raise UsageError(
            f"{tokens_per_step} tokens are no whole number of sequences of {length}",
            where="--tokens-per-step",
            hint="set data.max_seq_len to a divisor of it",
        )
    return load_recipe(recipe, overrides=[*overrides, f"train.batch_size={tokens_per_step // length}"])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _count(parameters: int) -> str:
    """'1.05 M', '8.03 B'."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _text(report: BenchReport) -> str:
    return "\n".join(
        (
            f"{report.device}: {_count(report.params_total)} parameters, {report.tokens_per_step:,} tokens a step "
            f"({report.micro_batches} x {report.micro_batch} x {report.seq_len}), activations on the "
            f"{report.activations}, {report.slots} slots",
            f"step {report.step_s:.3f} s ({report.step_s_min:.3f}-{report.step_s_max:.3f})   "
            f"{report.tokens_per_s:,.0f} tok/s   {report.tflops:.3g} TFLOP/s (6 N + causal attention, no recompute)",
            f"optimizer {report.optimizer_s:.3f} s, exposed {report.exposed_optimizer_s:.3f} s; "
            f"exposed transfers {report.exposed_transfer_s:.3f} s",
            (
                f"VRAM {format_size(report.vram_peak_bytes)} (planned {format_size(report.vram_planned_bytes)}); "
                if report.vram_peak_bytes
                else ""
            )
            + f"host {format_size(report.host_peak_bytes)} (planned {format_size(report.host_planned_bytes)}, "
            f"{report.host_bytes_per_parameter:.2f} B/parameter)",
            f"built in {report.build_s:.1f} s, warm-up {report.warmup_s:.1f} s",
        )
    )
