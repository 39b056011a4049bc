"""Memory stands still once a run is under way: steps, evaluations and logging take nothing more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20


def test_the_peak_does_not_grow_after_the_first_steps(tmp_path: Path) -> None:
    settings = {
        "data.packing": "true",  # rows of one length: every step has the same shapes
        "train.steps": "30",
        "train.batch_size": "4",
        "train.eval_every": "10",
        "train.log_every": "1",
        "data.eval_fraction": "0.02",
        "output.export": "false",
    }
    arguments = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "megatrain", "finetune", "quickstart", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    peaks = {line["step"]: line["host_peak_bytes"] for line in lines if line["kind"] == "train"}
    assert sum(line["kind"] == "eval" for line in lines) == 4  # before, at 10 and 20, and after
    assert len(peaks) == 30
    # the allocator's arenas settle by a few MiB; a gradient kept each step would be 15 times 2 MiB
    assert peaks[30] - peaks[15] < 8 * MIB, peaks
