"""``megatrain bench`` on the CPU: what it measures, writes and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import bench_command
from megatrain.errors import RecipeError, UsageError
from megatrain.recipe import resolve_asset

MODEL = str(resolve_asset("megatrain:kjv-tiny"))
CHATS = """\
model: {path: megatrain:kjv-tiny, init: random, config: {num_hidden_layers: 2}}
data: {train: megatrain:chatbot.jsonl, max_seq_len: 256}
train: {batch_size: 4}
output: {dir: runs/unused}
"""


def bench(*overrides: str, recipe: str | None = None, trace: Path | None = None, **options: Any) -> int:
    given: dict[str, Any] = {
        "model": None if recipe else MODEL,
        "overrides": ["memory.device=cpu", *overrides],
        "steps": 2,
        "tokens_per_step": None,
        "baseline": None,
        "baseline_timeout_s": 60,
        "trace": trace,
        "json": True,
    }
    return bench_command.run(recipe, **given | options)


def measured(capsys: pytest.CaptureFixture[str], *overrides: str, **options: Any) -> dict[str, Any]:
    assert bench(*overrides, **options) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_a_bare_architecture_is_measured_and_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = [sys.executable, "-m", "megatrain", "bench", "--model", MODEL, "--tokens-per-step", "512"]
    command += ["--set", "data.max_seq_len=64", "--set", "memory.micro_batch=4", "--set", "memory.device=cpu"]
    command += ["--steps", "2", "--trace", str(trace), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tokens_per_step"] == report["positions_per_step"] == 512
    assert report["micro_batch"] * report["micro_batches"] * report["seq_len"] == 512
    assert len(report["step_times_s"]) == 2
    assert report["step_s_min"] <= report["step_s"] <= report["step_s_max"]
    assert report["tokens_per_s"] == pytest.approx(512 / report["step_s"], rel=0.5)
    assert len(report["losses"]) == 2 + 2  # warm-up and measured
    assert report["losses"][0] == pytest.approx(7.6, abs=0.5)  # ln 2048: made-up weights know nothing
    assert report["bound_by"] in ("compute", "optimizer", "link")
    assert 0 < report["compute_busy_share"] <= 1
    assert report["mfu"] is report["light_s"] is report["vram_driver_bytes"] is None  # no peak is known of a CPU
    assert report["baselines"] == []
    names = [e["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    # two traced steps: stem, four layers and tail fetched in each forward, the two that left their slots once more
    assert sum(n.startswith("host") for n in names) == 2 * (6 + 2)
    assert sum(n.startswith("update(") for n in names) >= 6


def test_a_recipe_is_measured_on_its_own_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "chats.yaml"
    recipe.write_text(CHATS)
    packed = measured(capsys, recipe=str(recipe))
    apart = measured(capsys, "data.packing=false", recipe=str(recipe))
    assert packed["data"] == apart["data"] == "the recipe's rows"
    assert (packed["packed"], apart["packed"]) == (True, False)
    assert packed["positions_per_step"] == 4 * 256
    assert packed["tokens_per_step"] > 0.9 * packed["positions_per_step"]
    assert apart["tokens_per_step"] < apart["positions_per_step"] < 4 * 256
    assert packed["tokens_per_step"] > 4 * apart["tokens_per_step"]  # many short chats in a row against one


def test_what_people_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("data.max_seq_len=32", tokens_per_step=64, json=False, steps=1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1.05 M parameters, 64 tokens a step (1 x 2 x 32, random tokens)" in lines[0]
    assert "tok/s" in lines[1]
    assert "(6 N + causal attention, no recompute)" in lines[1]
    assert lines[2].startswith("held by ")
    assert "exposed transfers" in lines[3]
    assert "B/parameter" in lines[4]
    assert [line.split()[0] for line in lines[6:10]] == ["fetch", "compute", "send", "optimizer"]


def test_a_micro_batch_is_held_against_the_step_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The bare recipe's own step has 16 sequences."""
    asked = ("data.max_seq_len=16", "memory.micro_batch=20")
    found = measured(capsys, *asked, tokens_per_step=640, steps=1)
    assert (found["micro_batch"], found["micro_batches"]) == (20, 2)
    with pytest.raises(RecipeError, match="20 is more than the 10 sequences"):
        bench(*asked, tokens_per_step=160, steps=1)


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        (None, {"model": None}, "RECIPE or --model"),
        (None, {"tokens_per_step": 1000}, "no whole number of sequences"),
        (None, {"baseline": "magic"}, "there is no baseline 'magic'"),
    ],
)
def test_what_cannot_be_measured_is_refused(recipe: str | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bench(recipe=recipe, **options)
