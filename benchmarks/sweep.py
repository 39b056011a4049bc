"""How the cost of a step grows: with tokens per step, layers, sequence length and micro-batch, one at a time.

    python benchmarks/sweep.py --model benchmarks/shapes/qwen2.5-3b --budget 180 --out DIR
    python benchmarks/sweep.py --tiny --budget 120          small shapes on the CPU, to see that it works

Each point is a process of `megatrain bench --json`. The base is varied along one axis at a time; the points that
tell most come first, and what does not fit into the budget is left out and named. Writes sweep.md and sweep.json;
with --go-on, what sweep.json has is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from timed import TIMED_OUT, Done, run_timed

from megatrain.recipe import resolve_asset

LEAST_S = 12
"""A point is not begun with less time left."""


@dataclass(frozen=True)
class Point:
    """One measurement. None: as the model's config or the planner has it."""

    tokens: int
    seq_len: int
    layers: int | None = None
    micro_batch: int | None = None

    def arguments(self) -> list[str]:
        found = ["--tokens-per-step", str(self.tokens), "--set", f"data.max_seq_len={self.seq_len}"]
        if self.layers is not None:
            found += ["--set", f"model.config.num_hidden_layers={self.layers}"]
        if self.micro_batch is not None:
            found += ["--set", f"memory.micro_batch={self.micro_batch}"]
        return found


@dataclass(frozen=True)
class Axes:
    """A base, and the values of each axis in the order of what they tell."""

    base: Point
    tokens: tuple[int, ...]
    seq_len: tuple[int, ...]
    layers: tuple[int, ...]
    micro_batch: tuple[int, ...]


LARGE = Axes(
    base=Point(tokens=65_536, seq_len=1024),
    tokens=(4096, 131_072, 16_384, 32_768, 8192),
    seq_len=(32_768, 8192, 4096, 16_384, 2048),
    layers=(9, 18, 27),
    micro_batch=(1, 4, 32, 8, 2),
)
TINY = Axes(
    base=Point(tokens=512, seq_len=64), tokens=(128, 1024), seq_len=(32, 128), layers=(2, 8), micro_batch=(1, 4)
)


def points(axes: Axes) -> list[Point]:
    """The base, then the first value of every axis, the second of every axis, and so on; no point twice."""
    base = axes.base
    columns = (
        [replace(base, tokens=value) for value in axes.tokens],
        [replace(base, seq_len=value) for value in axes.seq_len],
        [replace(base, layers=value) for value in axes.layers],
        [replace(base, micro_batch=value) for value in axes.micro_batch],
    )
    found = [base]
    for rank in range(max(len(column) for column in columns)):
        found += [column[rank] for column in columns if rank < len(column)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Row:
    """What a point gave, or why it gave nothing."""

    point: Point
    result: dict[str, Any]
    failure: str | None


def measure(point: Point, *, model: str, extra: Sequence[str], steps: int, limit_s: float) -> Row | None:
    """None: it did not end within its time."""
    command = [sys.executable, "-m", "megatrain", "bench", "--model", model, "--steps", str(steps), "--json"]
    done = run_timed([*command, *point.arguments(), *extra], limit_s=limit_s)
    if done.code == TIMED_OUT:
        return None
    if done.code == 0:
        return Row(point, json.loads(done.stdout.splitlines()[-1]), None)
    return Row(point, {}, why(done))


def why(done: Done) -> str:
    """The first words of the error message, without its hint."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    return lines[0].removeprefix("error: ")[:120] if lines else f"exit code {done.code} after {done.seconds:.0f} s"


HEADER = (
    "| tokens/step | sequence | layers | micro-batch | step s | tok/s | TFLOP/s | update s | exposed update / link s "
    "| VRAM | host | held by | predicted s |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def table(rows: Sequence[Row], *, left_out: Sequence[Point]) -> str:
    """Markdown, sorted by axis: base first, then tokens, sequence, layers, micro-batch."""
    lines = [HEADER, *(line(row) for row in sorted(rows, key=_order(rows)))]
    if left_out:
        names = "; ".join(_changed(point, base=rows[0].point if rows else left_out[0]) for point in left_out)
        lines.append(f"\nNo time was left for: {names}.")
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    point, found = row.point, row.result
    layers = "all" if point.layers is None else str(point.layers)
    if row.failure is not None:
        cut = "auto" if point.micro_batch is None else str(point.micro_batch)
        return f"| {point.tokens:,} | {point.seq_len:,} | {layers} | {cut} | {row.failure} |" + " |" * 8
    predicted = found["estimate"]["step_s"] if found["estimate"] else None
    cells = (
        f"{point.tokens:,}",
        f"{point.seq_len:,}",
        layers,
        f"{found['micro_batches']} x {found['micro_batch']}",
        f"{found['step_s']:.3f}",
        f"{found['tokens_per_s']:,.0f}",
        f"{found['tflops']:.3g}",
        f"{found['optimizer_s']:.3f}",
        f"{found['exposed_optimizer_s']:.3f} / {found['exposed_transfer_s']:.3f}",
        _gib(found["vram_peak_bytes"]),
        _gib(found["host_peak_bytes"]),
        found["bound_by"],
        "-" if predicted is None else f"{predicted:.3f}",
    )
    return "| " + " | ".join(cells) + " |"


def _order(rows: Sequence[Row]) -> Any:
    base = rows[0].point if rows else Point(0, 0)

    def key(row: Row) -> tuple[int, ...]:
        now, then = asdict(row.point), asdict(base)
        moved = [i for i, name in enumerate(now) if now[name] != then[name]]
        return (moved[0] + 1 if moved else 0, *(value or 0 for value in now.values()))

    return key


def _changed(point: Point, *, base: Point) -> str:
    now, then = asdict(point), asdict(base)
    return ", ".join(f"{name} {now[name]:,}" for name in now if now[name] != then[name])


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes else "-"


def earlier(out: Path, *, asked: Sequence[str]) -> list[Row]:
    """What an earlier sweep into the same folder measured, of the same model in the same way."""
    file = out / "sweep.json"
    if not file.exists():
        return []
    rows = []
    for entry in json.loads(file.read_text()):
        point, failure = Point(**entry.pop("point")), entry.pop("failure")
        if entry.pop("asked", None) == list(asked) and failure is None:
            rows.append(Row(point, entry, failure))
    return rows


def words(*, model: str, extra: Sequence[str], steps: int) -> list[str]:
    """What makes two sweeps the same."""
    return [model, *extra, f"{steps} steps"]


def sweep(
    axes: Axes, *, model: str, extra: Sequence[str], steps: int, budget_s: float, out: Path, go_on: bool = False
) -> tuple[list[Row], list[Point]]:
    """Measure until the budget is used; the files are written anew after every point. (rows, points left out)

    go_on: what an earlier sweep measured is taken from `out`.
    """
    deadline = time.monotonic() + budget_s
    asked = words(model=model, extra=extra, steps=steps)
    rows = earlier(out, asked=asked) if go_on else []
    known = {row.point for row in rows}
    wanted = [point for point in points(axes) if point not in known]
    while wanted and (left_s := deadline - time.monotonic()) > LEAST_S:
        row = measure(wanted[0], model=model, extra=extra, steps=steps, limit_s=left_s)
        if row is None:
            break
        rows.append(row)
        del wanted[0]
        print(line(rows[-1]), file=sys.stderr, flush=True)
        (out / "sweep.md").write_text(table(rows, left_out=wanted))
        found = [{"point": asdict(row.point), "failure": row.failure, "asked": asked, **row.result} for row in rows]
        (out / "sweep.json").write_text(json.dumps(found))
    return rows, wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/shapes/qwen2.5-3b", help="folder with config.json")
    parser.add_argument("--budget", type=float, default=180, metavar="SECONDS")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each point")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for megatrain bench")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR")
    parser.add_argument("--go-on", action="store_true", help="keep what DIR/sweep.json has, measure the rest")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a machine without a GPU")
    given = parser.parse_args()
    model = str(resolve_asset("megatrain:kjv-tiny")) if given.tiny else given.model
    extra = [word for value in given.set for word in ("--set", value)]
    given.out.mkdir(parents=True, exist_ok=True)
    rows, left_out = sweep(
        TINY if given.tiny else LARGE,
        model=model,
        extra=extra,
        steps=given.steps,
        budget_s=given.budget,
        out=given.out,
        go_on=given.go_on,
    )
    print(table(rows, left_out=left_out), end="")


if __name__ == "__main__":
    main()
