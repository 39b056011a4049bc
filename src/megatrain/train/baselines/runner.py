"""Runs baselines in child processes: each gets the whole machine, and one that does not fit costs us nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import UsageError
from megatrain.train.baselines.work import Work

NAMES = ("resident", "fsdp", "deepspeed")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Baseline:
    """What a baseline measured, or why it did not."""

    name: str
    tokens_per_s: float | None
    result: dict[str, object]
    failure: str | None


def parse_names(text: str) -> tuple[str, ...]:
    """Names from ``resident,fsdp``. Raises UsageError for one that is unknown."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in NAMES:
            raise UsageError(f"there is no baseline {name!r}", where="--baseline", hint=f"one of {', '.join(NAMES)}")
    return names


def run_baselines(names: Sequence[str], *, work: Work) -> list[Baseline]:
    """One after another, in the order given."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "work.json")
        work.write(path)
        return [_run(name, path=path) for name in names]


def _run(name: str, *, path: Path) -> Baseline:
    command = [sys.executable, "-m", f"megatrain.train.baselines.{name}", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Baseline(name, None, {}, f"not done after {TIMEOUT_S} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"baseline"')]
    if done.returncode == 0 and lines:
        result = json.loads(lines[-1])
        return Baseline(name, float(result["tokens_per_s"]), result, None)
    return Baseline(name, None, {}, _reason(done.stderr, code=done.returncode))


def _reason(stderr: str, *, code: int) -> str:
    if "OutOfMemoryError" in stderr or "out of memory" in stderr:
        return "does not fit in VRAM"
    if code == -9:
        return "does not fit in host memory (killed)"
    last = [line for line in stderr.splitlines() if line.strip()]
    return last[-1].strip() if last else f"ended with exit code {code}"
