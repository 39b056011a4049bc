"""``megatrain bench``: measured steps of a recipe, or of a bare architecture, on this machine."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.cli.bench_text import baseline_table, report_text, trace_text
from megatrain.cli.output import emit
from megatrain.errors import UsageError
from megatrain.recipe import Recipe, load_recipe
from megatrain.report.console import colours
from megatrain.report.trace import write_chrome_trace

if TYPE_CHECKING:
    from megatrain.train.baselines.runner import Baseline
    from megatrain.train.baselines.work import Work
    from megatrain.train.bench import BenchResult

DEFAULT_STEPS = 5
TRACED_STEPS = 2  # in a trace file, so that the border of two steps is in it
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
    baseline_timeout_s: int,
    trace: Path | None,
    json: bool,
) -> int:
    """Measure and print; returns the exit code. A recipe is measured on its own data, a model on random tokens."""
    chosen = _recipe(recipe, model=model, overrides=overrides, tokens_per_step=tokens_per_step)
    from megatrain.train.baselines.runner import parse_names, run_baselines

    names = parse_names(baseline) if baseline is not None else ()
    count = steps or DEFAULT_STEPS
    result, work = _measure(
        chosen, own_data=recipe is not None, steps=count, traced_steps=1 if trace is None else TRACED_STEPS
    )
    if trace is not None:
        write_chrome_trace(trace, result.trace.spans)
    told = sys.stderr if json else sys.stdout
    print(report_text(result.report), file=told)
    print(trace_text(result.trace, coloured=colours(told)), file=told, flush=True)
    others = run_baselines(names, work=work, timeout_s=baseline_timeout_s, tell=_tell)
    if others:
        print(baseline_table(others, report=result.report), file=told, flush=True)
    if json:
        emit(result.report.to_dict() | {"baselines": [_compared(other, result=result) for other in others]})
    return 0


def _measure(recipe: Recipe, *, own_data: bool, steps: int, traced_steps: int) -> tuple[BenchResult, Work]:
    """What was measured, and the same work for others. When this returns, the device and the host are free again."""
    from megatrain.train.baselines.work import Work
    from megatrain.train.bench import bench
    from megatrain.train.bench_tokens import read_data
    from megatrain.train.model_config import model_path, read_config
    from megatrain.train.planning import plan_run

    prepared = read_data(recipe) if own_data else None
    planned = plan_run(recipe, config=read_config(recipe))
    result = bench(planned, steps=steps, prepared=prepared, traced_steps=traced_steps)
    work = Work(
        model=model_path(recipe),
        precision="bf16" if planned.model.spec.precision.itemsize == 2 else "fp32",
        config=recipe.model.config,
        seq_len=planned.plan.seq_len,
        tokens_per_step=recipe.train.batch_size * planned.plan.seq_len,
        micro_batch=planned.plan.micro_batch,
        steps=steps,
        max_grad_norm=recipe.train.max_grad_norm,
        other_vram_bytes=planned.plan.device.get("context and workspaces", 0),
    )
    device = planned.device
    del planned  # its model holds views of what was on the device
    device.release_cache()
    return result, work


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compared(other: Baseline, *, result: BenchResult) -> dict[str, object]:
    ratio = result.report.tokens_per_s / other.tokens_per_s if other.tokens_per_s else None
    return {"name": other.name, "failure": other.failure, "ratio": ratio, **other.result}


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
    if tokens_per_step is None:
        return load_recipe(recipe, overrides=overrides)
    # the length is not known yet; what else is said must hold for the step that is asked for, not for the recipe's
    most = [*overrides, f"train.batch_size={tokens_per_step}"]
    length = load_recipe(recipe, overrides=most).data.max_seq_len
    if tokens_per_step % length:
        raise UsageError(
            f"{tokens_per_step} tokens are no whole number of sequences of {length}",
            where="--tokens-per-step",
            hint="set data.max_seq_len to a divisor of it",
        )
    return load_recipe(recipe, overrides=[*overrides, f"train.batch_size={tokens_per_step // length}"])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
