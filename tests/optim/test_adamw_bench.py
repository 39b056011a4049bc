"""The benchmark of the optimizer says what it promises: rates with ratios in one object, and that bits are equal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "adamw_bench.py"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_rates_and_ratios_come_out_of_one_run() -> None:
    options = ("--elements", "200000", "--repeats", "2", "--threads", "1", "2", "--isa", "scalar")
    result = json.loads(run(*options, "--json"))
    assert result["elements"] == 200_000
    for threads in ("1 threads", "2 threads"):
        rates = result[threads]
        assert {"copy (memmove)", "torch fused, fp32", "scalar halves, bf16 moments"} <= set(rates)
        copied = rates["copy (memmove)"]["gb_s"]
        for rate in rates.values():
            assert rate["of_copy"] == pytest.approx(rate["gb_s"] / copied)
            assert rate["seconds"] <= rate["median_s"]
    assert "scalar full, bf16 moments" in run(*options)


@pytest.mark.slow
def test_the_check_compares_every_path() -> None:
    result = json.loads(run("--check"))
    assert result["equal"]
    assert result["cases"] >= 2 * 2 * 130 * (len(result["paths"]) + 1)
