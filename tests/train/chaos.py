"""Kill a run at random moments and resume it, until it is done; its bits must be those of an undisturbed run.

python tests/train/chaos.py --kills 200 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from whole import curve, state, weights, whole_recipe, write_rows

COMMAND = "from megatrain.cli.main import main; main()"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def write_recipe(folder: Path, *, rows: Path, save_every: int = 2) -> Path:
    """The recipe of a run in folder/run, as a file."""
    recipe = whole_recipe(
        folder / "run",
        rows=rows,
        data={"eval_fraction": 0.2},
        train={"save_every": save_every, "eval_every": 3, "epochs": 3},
    )
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    return path


def start(recipe: Path, *options: str) -> subprocess.Popen[str]:
    """A finetune process that resumes what it finds; stdout and stderr are pipes."""
    command = [sys.executable, "-c", COMMAND, "finetune", str(recipe), "--resume", "auto", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@dataclass
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # the last line of stderr before the kill
    rounds: int = 0  # runs brought to their end
    differing: list[str] = field(default_factory=list)
    wrong_codes: list[str] = field(default_factory=list)
    slowest_stop_s: float = 0.0


def kill_at(process: subprocess.Popen[str], *, after_s: float, signum: signal.Signals, tally: Tally) -> bool:
    """Whether the process was still running when its time came. Mostly it gets through its imports first."""
    if draw_head_start(after_s):
        assert process.stderr is not None
        process.stderr.readline()
    try:
        process.wait(after_s)
        process.communicate()
        return False
    except subprocess.TimeoutExpired:
        pass
    begin_s = time.monotonic()
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    tally.slowest_stop_s = max(tally.slowest_stop_s, time.monotonic() - begin_s)
    lines = [line for line in err.splitlines() if not line.startswith(("stopped", "interrupted"))]
    tally.phases[phase_of(lines[-1] if lines else "")] += 1
    tally.kills[signum.name] += 1
    allowed = {-signum, 128 + signum, 0}  # 0: it was just done; -signum: before our handlers stood
    if process.returncode not in allowed:
        tally.wrong_codes.append(f"{signum.name}: {process.returncode}: {err[-500:]}")
    return True


def draw_head_start(after_s: float) -> bool:
    """Five of six, decided by the digits of the drawn time."""
    return int(after_s * 1000) % 6 != 0


def phase_of(line: str) -> str:
    known = ("step", "eval", "writing", "saved", "exporting", "reading and", "reading the model", "reading", "taking")
    return next((word for word in known if line.startswith(word)), "starting" if not line else "other")


def chaos(kills: int, *, seed: int, folder: Path, span_s: float) -> Tally:
    """`span_s`: kills come within so many seconds of a process's start."""
    tally, draw = Tally(), random.Random(seed)
    (folder / "whole").mkdir()
    rows = write_rows(folder / "rows.jsonl")
    process = start(write_recipe(folder / "whole", rows=rows))
    _, err = process.communicate()
    assert process.returncode == 0, err
    while sum(tally.kills.values()) < kills:
        work = folder / f"round-{tally.rounds}"
        work.mkdir()
        recipe = write_recipe(work, rows=rows)
        for _ in range(draw.randint(2, 6)):
            running = start(recipe)
            if not kill_at(running, after_s=draw.uniform(0, span_s), signum=draw.choice(SIGNALS), tally=tally):
                break
        process = start(recipe)
        _, err = process.communicate()
        tally.rounds += 1
        if process.returncode == 0:
            compare(work / "run", folder / "whole" / "run", tally=tally)
        else:
            tally.wrong_codes.append(f"the last resume: {process.returncode}: {err[-1000:]}")
    return tally


def compare(run: Path, whole: Path, *, tally: Tally) -> None:
    if weights(run) != weights(whole) or state(run) != state(whole):
        tally.differing.append(f"{run}: bits")
    if curve(run, "step", "loss", "lr", "grad_norm") != curve(whole, "step", "loss", "lr", "grad_norm"):
        tally.differing.append(f"{run}: losses")
    if curve(run, "step", "loss", kind="eval") != curve(whole, "step", "loss", kind="eval"):
        tally.differing.append(f"{run}: evaluations")
    left = [path.name for path in run.rglob("*") if "partial" in path.name or path.name in ("lock", "crash.txt")]
    if left:
        tally.differing.append(f"{run}: left behind {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--span", type=float, default=4.0, help="seconds of a process within which a kill comes")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        tally = chaos(chosen.kills, seed=chosen.seed, folder=Path(folder), span_s=chosen.span)
    print(f"kills: {dict(tally.kills)}; when: {dict(tally.phases)}; runs brought to their end: {tally.rounds}")
    print(f"slowest stop: {tally.slowest_stop_s:.1f} s")
    for problem in (*tally.differing, *tally.wrong_codes):
        print(problem)
    sys.exit(bool(tally.differing or tally.wrong_codes))


if __name__ == "__main__":
    main()
