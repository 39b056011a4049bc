"""Whole runs whose MLPs run in tiles: the numbers of whole layers, and resumed as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from whole import assert_resumed_as_undisturbed, curve, train, whole_recipe, write_rows

from megatrain.plan import cutting, memory
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.job import Job
from megatrain.recipe import Recipe
from megatrain.train.manifest import read_manifest

TILE = 16
KEYS = ("step", "loss", "grad_norm")


def recipe_of(folder: Path) -> Recipe:
    rows = folder.parent / "rows.jsonl"
    if not rows.exists():
        write_rows(rows)
    return whole_recipe(
        folder,
        rows=rows,
        memory={"device": "cpu", "compile": "off", "micro_batch": 2, "threads": 2},
        train={"epochs": 2, "batch_size": 4},
    )


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has no room for a layer's backward. A run that is resumed is planned as ever."""

    def attempt(job: Job) -> MemoryPlan:
        return cutting.attempt(job) if job.resumed else next(cutting.cuts(job, tile=TILE))

    monkeypatch.setattr(memory, "attempt", attempt)


def test_losses_and_weights_are_those_of_whole_layers(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    train(recipe_of(tmp_path / "whole"))
    request.getfixturevalue("in_tiles")
    train(recipe_of(tmp_path / "tiles"))
    plan = read_manifest(max((tmp_path / "tiles" / "checkpoints").glob("step-*"))).identity.plan
    assert plan["tile_tokens"] == TILE
    whole, tiles = (
        [number for line in curve(tmp_path / name, *KEYS) for number in line] for name in ("whole", "tiles")
    )
    assert len(whole) == len(tiles) >= 3 * 4
    assert tiles == pytest.approx(whole, rel=1e-5)
    theirs, ours = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "tiles"))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[n] - t).abs().mean()) for n, t in theirs.items()) < 1e-6


def test_interrupted_and_resumed_is_bit_equal(tmp_path: Path, in_tiles: None) -> None:
    assert_resumed_as_undisturbed(recipe_of, tmp_path, keys=KEYS)
