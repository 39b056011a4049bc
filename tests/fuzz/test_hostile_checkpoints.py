"""A manifest that was forged, with a checksum that is right: skipped with the reason, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz.checkpoint_targets import _whole, forged
from fuzz.commands import ask, write_recipe
from megatrain.train.manifest import Damaged, read_manifest
from megatrain.train.typed import misfit

Forge = Callable[[dict[str, Any]], object]
FORGERIES: dict[str, Forge] = {
    "a recipe that is a number": lambda m: m["identity"].update(recipe=5),
    "steps as text": lambda m: m["identity"].update(total_steps="10"),
    "negative step": lambda m: m["state"].update(step=-1),
    "a step that is true": lambda m: m["state"].update(step=True),
    "no epoch": lambda m: m["state"].update(epoch=None),
    "an epoch beyond counting": lambda m: m["state"].update(epoch=2**70),
    "a plan that is a list": lambda m: m["identity"].update(plan=[]),
    "a precision of its own": lambda m: m["identity"].update(precision="fp4"),
    "a file outside": lambda m: m["files"].update({"../x": {"bytes": 1, "checksum": ""}}),
    "a file of no name": lambda m: m["files"].update({"a\0b": {"bytes": 1, "checksum": ""}}),
    "a size as text": lambda m: m["files"].update({"x": {"bytes": "1", "checksum": ""}}),
    "versions that are numbers": lambda m: m["identity"].update(versions={"python": 3}),
    "nothing in it": lambda m: m.clear() or m.update(checksum=""),
}


def write_forged(folder: Path, forge: Forge) -> Path:
    manifest = _whole()
    forge(manifest)
    path = folder / "run" / "checkpoints" / "step-000001"
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(forged(json.dumps(manifest).encode()))
    return path


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_no_run_writes_is_damaged(tmp_path: Path, forgery: str) -> None:
    with pytest.raises(Damaged, match=r"manifest|missing|format"):
        read_manifest(write_forged(tmp_path, FORGERIES[forgery]))


def test_the_unforged_one_is_read(tmp_path: Path) -> None:
    manifest = read_manifest(write_forged(tmp_path, lambda m: None))
    assert misfit(manifest) is None
    assert manifest.state.step == 1


def test_a_resume_from_a_forged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_forged(tmp_path, FORGERIES["a recipe that is a number"])
    answer = ask(capsys, "finetune", write_recipe(tmp_path), "--dry-run", "--resume", str(path))
    assert (answer.code, "holds what no run writes: identity is" in answer.message) == (2, True)


def test_a_forged_recipe_within_is_told_with_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_forged(tmp_path, lambda m: m["identity"]["recipe"]["optimizer"].update(lr="no"))
    answer = ask(capsys, "finetune", write_recipe(tmp_path), "--dry-run", "--resume", str(path))
    assert (answer.code, str(path) in answer.message, "optimizer.lr" in answer.message) == (2, True, True)
