"""``megatrain bench`` on the CPU: what it measures, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megatrain.recipe import resolve_asset

MODEL = str(resolve_asset("megatrain:kjv-tiny"))


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatrain", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_bare_architecture_is_measured_and_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    tokens = ["--tokens-per-step", "512", "--set", "data.max_seq_len=64", "--set", "memory.micro_batch=4"]
    done = bench("--model", MODEL, *tokens, "--steps", "2", "--trace", str(trace), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tokens_per_step"] == 512
    assert report["micro_batch"] * report["micro_batches"] * report["seq_len"] == 512
    assert report["tokens_per_s"] * report["step_s"] > 511
    assert len(report["losses"]) == 2 + 2  # warm-up and measured
    names = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    # two traced steps: four layers fetched in each forward, the two that left their slots once more
    assert sum(n.startswith("host") for n in names) == 2 * (6 + 2)
    assert sum(n.startswith("update(") for n in names) >= 6


def test_what_cannot_be_measured_is_refused() -> None:
    for arguments, reason in (
        ((), "RECIPE or --model"),
        (("--model", MODEL, "--tokens-per-step", "1000"), "no whole number of sequences"),
        (("--model", MODEL, "--baseline", "magic"), "there is no baseline 'magic'"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2, arguments
        assert reason in done.stderr
