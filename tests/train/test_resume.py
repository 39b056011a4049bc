"""Where a run starts: every kind of folder against every kind of --resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from fakes import IDENTITY, RecordingConsole, tiny_recipe, tiny_store

from megatrain.errors import RecipeError, UsageError
from megatrain.recipe import Recipe
from megatrain.train.checkpoint_writer import CheckpointWriter
from megatrain.train.resume import check_same_run, decide
from megatrain.train.rundir import RunDir
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState


def fill(rundir: RunDir, *steps: int, recipe: Recipe | None = None, status: str | None = None) -> None:
    identity = dataclasses.replace(IDENTITY, recipe=(recipe or tiny_recipe(rundir.path)).to_dict())
    store, console = tiny_store(), RecordingConsole()
    writer = CheckpointWriter(
        rundir.checkpoints, store=store, identity=identity, keep=9, console=console, stop=StopFlag()
    )
    for step in steps:
        writer.save(TrainState(step=step))
    rundir.metrics.write_text('{"kind": "train", "step": 1}\n')
    if status is not None:
        rundir.model.mkdir()
        rundir.write_summary({"status": status})


def steps(rundir: RunDir, resume: str, **sections: Any) -> list[int]:
    start = decide(rundir, resume=resume, recipe=tiny_recipe(rundir.path, **sections))
    return [c.state.step for c in start.candidates]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_an_empty_or_absent_folder_starts_afresh(tmp_path: Path, rundir: RunDir, resume: str) -> None:
    for folder in (rundir, RunDir(tmp_path / "absent")):
        start = decide(folder, resume=resume, recipe=tiny_recipe(folder.path))
        assert (start.candidates, start.replaces, start.finished, start.warnings) == ((), False, False, ())
    assert not (tmp_path / "absent").exists(), "deciding writes nothing"


def test_never_refuses_a_run_unless_it_may_overwrite(rundir: RunDir) -> None:
    fill(rundir, 4)
    with pytest.raises(UsageError, match="holds another run") as caught:
        steps(rundir, "never")
    assert caught.value.hint is not None
    assert "--resume auto" in caught.value.hint
    start = decide(rundir, resume="never", recipe=tiny_recipe(rundir.path, output={"dir": "x", "overwrite": True}))
    assert start.replaces
    assert not start.candidates


def test_auto_takes_the_newest_and_falls_back(rundir: RunDir) -> None:
    fill(rundir, 4, 8, 12)
    (rundir.checkpoints / "step-000012" / "manifest.json").unlink()
    start = decide(rundir, resume="auto", recipe=tiny_recipe(rundir.path))
    assert [c.state.step for c in start.candidates] == [8, 4]
    assert start.in_place
    assert len(start.warnings) == 1
    assert start.warnings[0].startswith("step-000012 was skipped: ")


def test_auto_without_a_usable_checkpoint_starts_over_and_says_what_was_skipped(rundir: RunDir) -> None:
    fill(rundir, 4)
    (rundir.checkpoints / "step-000004" / "manifest.json").unlink()
    start = decide(rundir, resume="auto", recipe=tiny_recipe(rundir.path))
    assert (start.candidates, start.replaces) == ((), True)
    assert "step-000004 was skipped" in start.warnings[0]


def test_auto_never_throws_a_finished_model_away(rundir: RunDir) -> None:
    fill(rundir, 4, status="done")
    (rundir.checkpoints / "step-000004" / "manifest.json").unlink()
    with pytest.raises(UsageError, match="no usable checkpoint: step-000004 was skipped"):
        steps(rundir, "auto")


def test_a_model_without_a_run_is_not_finished_and_stays(rundir: RunDir) -> None:
    """Whatever it is: a file, a folder, a link that leads nowhere."""
    for make in (lambda: rundir.model.mkdir(), lambda: rundir.model.touch(), lambda: rundir.model.symlink_to("absent")):
        make()
        with pytest.raises(UsageError, match=r"neither a checkpoint nor a run\.json") as caught:
            steps(rundir, "auto")
        assert caught.value.exit_code == 2
        rundir.model.rmdir() if rundir.model.is_dir() else rundir.model.unlink()


def test_a_finished_run_without_checkpoints_is_finished_as_long_as_nothing_else_is_asked(rundir: RunDir) -> None:
    recipe = tiny_recipe(rundir.path)
    fill(rundir, status="done")
    with pytest.raises(UsageError, match=r"nor a recipe\.yaml"):
        steps(rundir, "auto")
    rundir.write_recipe(recipe.to_yaml())
    assert decide(rundir, resume="auto", recipe=recipe).finished
    with pytest.raises(RecipeError, match=r"optimizer\.lr, train\.steps changed") as caught:
        steps(rundir, "auto", train={"steps": 50}, optimizer={"lr": 1.0})
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match=r"not as output\.export_dtype=fp32"):
        steps(rundir, "auto", output={"dir": str(rundir.path), "export_dtype": "fp32"})
    rundir.model.rmdir()
    with pytest.raises(UsageError, match="its model is gone too"):
        steps(rundir, "auto")
    assert decide(
        rundir, resume="auto", recipe=tiny_recipe(rundir.path, output={"dir": str(rundir.path), "export": False})
    ).finished


def test_a_finished_run_says_how_its_model_is_had_in_another_dtype(rundir: RunDir) -> None:
    fill(rundir, 4, status="done")
    (rundir.model / "config.json").write_text('{"dtype": "bfloat16"}')
    for dtype, said in (("auto", False), ("bf16", False), ("fp32", True)):
        wanted = tiny_recipe(rundir.path, output={"dir": str(rundir.path), "export_dtype": dtype})
        start = decide(rundir, resume="auto", recipe=wanted)
        assert start.finished
        assert [f"megatrain export {rundir.path} OUT --dtype fp32" in text for text in start.warnings] == [True] * said
        assert all("was exported as bf16, not as output.export_dtype=fp32" in text for text in start.warnings)


@pytest.mark.parametrize("status", [None, "done"])
def test_a_checkpoint_beyond_the_end_that_is_asked_for_is_refused(rundir: RunDir, status: str | None) -> None:
    fill(rundir, 2, 3, 5, status=status)
    with pytest.raises(UsageError, match=r"5 steps into the run, and train\.steps=4 ends before") as caught:
        steps(rundir, "auto", train={"steps": 4})
    assert caught.value.exit_code == 2
    assert f"--resume {rundir.checkpoints / 'step-000003'} " in str(caught.value.hint)
    assert steps(rundir, str(rundir.checkpoints / "step-000003"), train={"steps": 4}) == [3]
    assert steps(rundir, "auto", train={"steps": 5}) == [5, 3, 2]
    with pytest.raises(UsageError) as caught:
        steps(rundir, "auto", train={"steps": 1})
    assert "no checkpoint from before that end is left" in str(caught.value.hint)


def test_a_finished_run_is_finished_until_its_length_changes(rundir: RunDir) -> None:
    fill(rundir, 4, status="done")
    start = decide(rundir, resume="auto", recipe=tiny_recipe(rundir.path))
    assert start.finished
    assert "finished after 4 steps" in start.notes[0]
    longer = decide(rundir, resume="auto", recipe=tiny_recipe(rundir.path, train={"epochs": 3}))
    assert not longer.finished
    assert longer.candidates[0].state.step == 4
    rundir.model.rmdir()  # interrupted in the export, or deleted: it is written again
    assert not decide(rundir, resume="auto", recipe=tiny_recipe(rundir.path)).finished


def test_a_finished_run_goes_on_from_an_earlier_checkpoint_that_is_named(rundir: RunDir) -> None:
    fill(rundir, 4, 8, status="done")
    recipe = tiny_recipe(rundir.path)
    assert decide(rundir, resume=str(rundir.path), recipe=recipe).finished
    assert decide(rundir, resume=str(rundir.checkpoints / "step-000008"), recipe=recipe).finished
    earlier = decide(rundir, resume=str(rundir.checkpoints / "step-000004"), recipe=recipe)
    assert not earlier.finished
    assert earlier.notes[0].endswith("after step 4")


def test_a_path_may_be_a_run_or_a_checkpoint_here_or_elsewhere(tmp_path: Path, rundir: RunDir) -> None:
    fill(rundir, 4, 8)
    assert steps(rundir, str(rundir.path)) == [8, 4]
    assert steps(rundir, str(rundir.checkpoints / "step-000004")) == [4]
    other = RunDir(tmp_path / "other")
    start = decide(other, resume=str(rundir.checkpoints / "step-000004"), recipe=tiny_recipe(other.path))
    assert not start.in_place
    assert start.candidates[0].state.step == 4
    fill(other, 2)
    with pytest.raises(UsageError, match="holds another run"):
        steps(other, str(rundir.path))


@pytest.mark.parametrize("what", ["nowhere", "empty", "damaged"])
def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, rundir: RunDir, what: str) -> None:
    fill(rundir, 4)
    (tmp_path / "empty").mkdir()
    (rundir.checkpoints / "step-000004" / "manifest.json").write_text("{}")
    paths = {"nowhere": tmp_path / "no", "empty": tmp_path / "empty", "damaged": rundir.checkpoints / "step-000004"}
    with pytest.raises(UsageError):
        steps(rundir, str(paths[what]))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"optimizer": {"lr": 3e-5}}, "optimizer.lr"),
        ({"train": {"batch_size": 8}}, "train.batch_size"),
        ({"train": {"seed": 1}}, "train.seed"),
        ({"data": {"train": "other.jsonl", "eval": "held.jsonl"}}, "data.train"),
        ({"model": {"path": "other/model"}}, "model.path"),
    ],
)
def test_what_may_not_change_is_refused_by_name(rundir: RunDir, sections: dict[str, Any], key: str) -> None:
    fill(rundir, 4)
    with pytest.raises(RecipeError, match=key.replace(".", r"\.")) as caught:
        steps(rundir, "auto", **sections)
    assert caught.value.exit_code == 2


def test_what_may_change(rundir: RunDir) -> None:
    fill(rundir, 4)
    changed = {
        "train": {"epochs": None, "steps": 50, "save_every": 3, "eval_every": 2, "log_every": 5},
        "memory": {"micro_batch": 1, "threads": 3},
        "output": {"dir": str(rundir.path), "keep": 7},
        "report": {"tensorboard": True},
    }
    assert steps(rundir, "auto", **changed) == [4]


@pytest.mark.parametrize("key", ["model", "tokenizer"])
def test_a_run_may_not_overwrite_what_it_starts_from(rundir: RunDir, key: str) -> None:
    rundir.model.mkdir()
    sections = {key: {"path": str(rundir.path / "." / "model")}}
    with pytest.raises(UsageError, match="would write its own model") as caught:
        steps(rundir, "never", output={"dir": str(rundir.path), "overwrite": True}, **sections)
    assert caught.value.where == f"{key}.path"


@pytest.mark.parametrize("field", ["config_hash", "precision", "data"])
def test_what_only_shows_later_is_refused_too(field: str) -> None:
    check_same_run(IDENTITY, now=dataclasses.replace(IDENTITY, total_steps=99, plan={"micro_batch": 1}))
    with pytest.raises(UsageError, match="not that of the checkpoint"):
        check_same_run(IDENTITY, now=dataclasses.replace(IDENTITY, **{field: "other"}))
