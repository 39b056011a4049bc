"""Thousands of steps in one process: memory, threads, files and page faults stand still, checkpoints and all.

python tests/train/soak.py --steps 3000
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whole import session, whole_recipe, write_rows

from megatrain.report.events import StepReport

MIB = 1 << 20
RSS_GROWTH_BYTES = 16 * MIB  # the allocator's arenas settle; a gradient kept each step would be 2 MiB a step
FAULTS_GROWTH = 100  # minor faults a step; a buffer of 2 MiB that is taken anew in each step would be 512
WARM_SHARE = 0.2  # of the steps: the first checkpoints and evaluations are in it


@dataclass(frozen=True)
class Sample:
    """The process after a step."""

    step: int
    rss_bytes: int
    vram_bytes: int
    files: int
    threads: int
    minor_faults: int

    @classmethod
    def now(cls, step: int, *, vram_bytes: int) -> Sample:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            step,
            rss_bytes=pages * os.sysconf("SC_PAGESIZE"),
            vram_bytes=vram_bytes,
            files=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            minor_faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        )


def soak(steps: int, *, folder: Path, device: str, every: int) -> list[Sample]:
    """Train a million parameters with evaluations and checkpoints; a line every so many steps."""
    samples: list[Sample] = []

    def on_event(event: Any, stop: object) -> None:
        if isinstance(event, StepReport) and (event.step <= 4 or event.step % every == 0):
            samples.append(Sample.now(event.step, vram_bytes=event.vram_peak_bytes))
            print(line(samples[-1], before=samples[max(0, len(samples) - 2)]), flush=True)

    recipe = whole_recipe(
        folder / "run",
        rows=write_rows(folder / "rows.jsonl"),
        data={"eval_fraction": 0.2},
        train={"epochs": None, "steps": steps, "eval_every": steps // 20, "save_every": steps // 12},
        optimizer={"lr": 1e-5},
        memory={"device": device},
    )
    session(recipe, on_event=on_event).run()
    return samples


def line(s: Sample, *, before: Sample) -> str:
    faults = (s.minor_faults - before.minor_faults) / max(1, s.step - before.step)
    memory = f"{s.rss_bytes / MIB:7.1f}  {s.vram_bytes / MIB:7.1f}"
    return f"{s.step:6}  {memory}  {s.files:5}  {s.threads:7}  {faults:8.1f}"


def problems(samples: Sequence[Sample], *, steps: int) -> list[str]:
    """What grew after the warm-up."""
    warm = [s for s in samples if s.step >= WARM_SHARE * steps]
    found = []
    if warm[-1].rss_bytes - warm[0].rss_bytes > RSS_GROWTH_BYTES:
        found.append(f"RSS grew by {(warm[-1].rss_bytes - warm[0].rss_bytes) / MIB:.1f} MiB")
    if warm[-1].vram_bytes > warm[0].vram_bytes:
        found.append(f"VRAM grew by {(warm[-1].vram_bytes - warm[0].vram_bytes) / MIB:.1f} MiB")
    half = len(warm) // 2
    before, now = _faults(warm[: half + 1]), _faults(warm[half:])
    if now > before + FAULTS_GROWTH:
        found.append(f"minor faults: {before:.0f} a step before, {now:.0f} now")
    # a checkpoint that is being written has a few of its own: the quiet moments are compared
    for name in ("files", "threads"):
        first, last = (min(getattr(s, name) for s in part) for part in (warm[:half], warm[half:]))
        if last > first:
            found.append(f"{name}: {first} before, {last} now")
    return found


def _faults(samples: Sequence[Sample]) -> float:
    """Per step, from the first to the last."""
    return (samples[-1].minor_faults - samples[0].minor_faults) / max(1, samples[-1].step - samples[0].step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    print("  step      RSS     VRAM  files  threads  minor faults per step since the line before")
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(chosen.steps, folder=Path(folder), device=chosen.device, every=max(1, chosen.steps // 20))
    found = problems(samples, steps=chosen.steps)
    print("\n".join(found) or "nothing grew")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
