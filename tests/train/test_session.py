"""Whole runs through the real rooms, in this process: what is left in the folder, and that a resume is exact."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole import WORDS, curve, session, state, train, weights, whole_recipe, write_rows

from megatrain.errors import DataError, DiskError, DoesNotFit, NonFinite, RecipeError, UsageError
from megatrain.plan.accounting import checkpoint_bytes
from megatrain.recipe import load_recipe, resolve_asset
from megatrain.report.events import SaveReport, StepReport
from megatrain.stream.step import StepNumbers
from megatrain.train import prospect
from megatrain.train.checkpoint import Checkpoint, remove
from megatrain.train.export import export_checkpoint
from megatrain.train.manifest import Manifest
from megatrain.train.model_config import read_config
from megatrain.train.rundir import RunDir
from megatrain.train.signals import Interrupted, StopFlag


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train(whole_recipe(folder, rows=write_rows(folder / "rows.jsonl")))
    return folder


def files(folder: Path) -> dict[Path, int]:
    """Every file and when it was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def stop_after(step: int) -> Callable[[Any, StopFlag], None]:
    def on_event(event: Any, stop: StopFlag) -> None:
        if isinstance(event, StepReport) and event.step == step:
            stop.request(signal.SIGTERM)

    return on_event


def test_what_a_run_leaves(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "läuft hier"
    recipe = whole_recipe(folder, rows=rows, data={"eval_fraction": 0.2}, train={"eval_every": 2, "save_every": 2})
    report = train(recipe)
    names = {path.name for path in folder.iterdir()}
    assert names == {"recipe.yaml", "metrics.jsonl", "checkpoints", "model", "run.json"}
    assert load_recipe(str(folder / "recipe.yaml")) == recipe
    assert json.loads((folder / "run.json").read_text()) == report.to_json()
    assert (report.status, report.exit_code) == ("done", 0)
    total = report.steps
    assert [step for (step,) in curve(folder, "step")] == list(range(1, total + 1))
    assert [step for (step,) in curve(folder, "step", kind="eval")] == sorted({*range(0, total + 1, 2), total})
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert report.tokens == sum(tokens for (tokens,) in curve(folder, "tokens"))
    assert report.eval_loss == curve(folder, "loss", kind="eval")[-1][0]
    model, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Define king."}], return_tensors="pt")["input_ids"]
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_interrupted_in_the_second_epoch_and_resumed_is_bit_equal(tmp_path: Path, rows: Path, precision: str) -> None:
    settings = {"train": {"precision": precision}}
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "parts"
    reference = train(whole_recipe(undisturbed, rows=rows, **settings))
    first_epoch = sum(epoch <= 1 for (epoch,) in curve(undisturbed, "epoch"))
    assert reference.steps > first_epoch + 1
    recipe = whole_recipe(folder, rows=rows, **settings)
    with pytest.raises(Interrupted) as caught:
        train(recipe, on_event=stop_after(first_epoch + 1))
    assert caught.value.exit_code == 143
    summary = json.loads((folder / "run.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("interrupted", 143, first_epoch + 1)
    assert not (folder / "model").exists()
    said: list[str] = []
    resumed = train(recipe, resume="auto", on_event=lambda *_: said.append((folder / "run.json").read_text()))
    assert {json.loads(text)["status"] for text in said} == {"running"}
    assert resumed.tokens_here == resumed.tokens - summary["tokens"] > 0
    keys = ("step", "epoch", "loss", "lr", "grad_norm", "tokens")
    assert curve(folder, *keys) == curve(undisturbed, *keys)
    assert weights(folder) == weights(undisturbed)
    assert state(folder) == state(undisturbed)
    assert (resumed.first_loss, resumed.tokens) == (reference.first_loss, reference.tokens)


def test_dropout_and_the_seed_matter_so_the_test_above_tests_something(tmp_path: Path, rows: Path, whole: Path) -> None:
    losses = {tuple(curve(whole, "loss"))}
    for name, sections in {"no dropout": {"model": {"config": {}}}, "other seed": {"train": {"seed": 1}}}.items():
        train(whole_recipe(tmp_path / name, rows=rows, **sections))
        losses.add(tuple(curve(tmp_path / name, "loss")))
    assert len(losses) == 3


@pytest.fixture
def interrupted(tmp_path: Path, rows: Path) -> Path:
    """A run with checkpoints of steps 1 and 2, interrupted after step 2."""
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(whole_recipe(folder, rows=rows, train={"save_every": 1}), on_event=stop_after(2))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    return folder


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / "0002-layer-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


def test_a_bit_that_flipped_on_disk_costs_one_checkpoint_and_no_more(
    tmp_path: Path, rows: Path, interrupted: Path, whole: Path
) -> None:
    flip_a_bit(interrupted / "checkpoints" / "step-000002")
    again = session(whole_recipe(interrupted, rows=rows), resume="auto")
    again.run()
    told = again.told  # type: ignore[attr-defined]
    assert any("step-000002 was skipped: 0002-layer-1.safetensors does not match" in text for text in told)
    assert curve(interrupted, "step", "loss") == curve(whole, "step", "loss")
    assert weights(interrupted) == weights(whole)


def test_when_all_are_damaged_auto_starts_afresh_and_a_path_is_refused(
    tmp_path: Path, rows: Path, interrupted: Path, whole: Path
) -> None:
    for checkpoint in (interrupted / "checkpoints").iterdir():
        flip_a_bit(checkpoint)
    with pytest.raises(UsageError, match="no checkpoint of"):
        train(whole_recipe(interrupted, rows=rows), resume=str(interrupted))
    train(whole_recipe(interrupted, rows=rows), resume="auto")
    assert curve(interrupted, "step", "loss") == curve(whole, "step", "loss")
    assert weights(interrupted) == weights(whole)


def test_a_resume_refuses_other_rows_and_other_numbers(rows: Path, interrupted: Path) -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.lr changed"):
        train(whole_recipe(interrupted, rows=rows, optimizer={"lr": 2e-3}), resume="auto")
    before = json.loads((interrupted / "run.json").read_text())
    write_rows(rows, words=WORDS[:-1])
    with pytest.raises(UsageError, match="the data is not that of the checkpoint"):
        train(whole_recipe(interrupted, rows=rows), resume="auto")
    assert json.loads((interrupted / "run.json").read_text()) == before, "a refusal changes nothing"


def test_more_epochs_on_resume(rows: Path, interrupted: Path) -> None:
    longer = session(whole_recipe(interrupted, rows=rows, train={"epochs": 3}), resume="auto")
    report = longer.run()
    told = longer.told  # type: ignore[attr-defined]
    assert any(f"now has {report.steps} steps" in text and "learning rate follows" in text for text in told)
    assert report.epochs == 3
    assert report.steps == len(curve(interrupted, "step"))


CALM: dict[str, Any] = {"model": {"config": {}}}  # dropout draws by micro-batch


@pytest.mark.parametrize(
    "memory",
    [
        {"micro_batch": 2, "threads": 1},
        {"micro_batch": 2, "threads": 2, "slots": 3, "activations": "host"},
        {"micro_batch": 1, "threads": 1},
    ],
)
def test_a_checkpoint_goes_on_on_another_machine(tmp_path: Path, rows: Path, memory: dict[str, Any]) -> None:
    """Threads, slots and where activations wait move no bit; another micro-batch moves roundings, and it says so."""
    before, after = tmp_path / "before", tmp_path / "after"
    with pytest.raises(Interrupted):
        train(whole_recipe(before, rows=rows, **CALM), on_event=stop_after(2))
    shutil.copytree(before, after)
    train(whole_recipe(before, rows=rows, **CALM), resume="auto")
    other = session(
        whole_recipe(after, rows=rows, memory={"device": "cpu", "compile": "off"} | memory, **CALM), resume="auto"
    )
    other.run()
    told = other.told  # type: ignore[attr-defined]
    assert any("micro-batches of 1 rows (were 2)" in text for text in told) == (memory["micro_batch"] == 1)
    if memory["micro_batch"] == 2:
        assert state(after) == state(before)
        assert curve(after, "loss", "grad_norm") == curve(before, "loss", "grad_norm")
        return
    for (loss,), (other_loss,) in zip(curve(before, "loss"), curve(after, "loss"), strict=True):
        assert other_loss == pytest.approx(loss, rel=2e-6)
    for (norm,), (other_norm,) in zip(curve(before, "grad_norm"), curve(after, "grad_norm"), strict=True):
        assert other_norm == pytest.approx(norm, rel=2e-5)


def test_killed_after_going_back_to_an_older_checkpoint_it_goes_on_from_there(tmp_path: Path, rows: Path) -> None:
    """Neither the steps of the future that was given up nor a hole in metrics.jsonl are left."""
    folder = tmp_path / "run"
    recipe = whole_recipe(folder, rows=rows, train={"save_every": 2}, output={"dir": str(folder), "keep": 9})
    train(recipe)
    before = weights(folder), state(folder), curve(folder, "step", "loss")

    class Killed(BaseException):
        pass

    def kill(event: Any, stop: StopFlag) -> None:
        if isinstance(event, StepReport) and event.step == 3:
            raise Killed

    with pytest.raises(Killed):
        train(recipe, resume=str(folder / "checkpoints" / "step-000002"), on_event=kill)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "given-up-000004",
        "given-up-000006",
        "step-000002",
    ]
    again = session(recipe, resume="auto")
    again.run()
    told = again.told  # type: ignore[attr-defined]
    assert any("after step 2" in text for text in told)
    assert (weights(folder), state(folder), curve(folder, "step", "loss")) == before
    assert not list((folder / "checkpoints").glob("given-up-*"))


def test_a_future_that_was_given_up_can_still_be_named_until_the_next_checkpoint(
    tmp_path: Path, rows: Path, whole: Path
) -> None:
    folder = tmp_path / "run"
    recipe = whole_recipe(folder, rows=rows, train={"save_every": 2}, output={"dir": str(folder), "keep": 9})
    train(recipe)

    class Killed(BaseException):
        pass

    def kill(event: Any, stop: StopFlag) -> None:
        raise Killed

    with pytest.raises(Killed):
        train(recipe, resume=str(folder / "checkpoints" / "step-000002"), on_event=kill)
    train(recipe, resume=str(folder / "checkpoints" / "given-up-000004"))
    assert weights(folder) == weights(whole)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000006"]


def test_a_checkpoint_can_go_on_in_another_folder(tmp_path: Path, rows: Path, interrupted: Path, whole: Path) -> None:
    train(whole_recipe(tmp_path / "other", rows=rows), resume=str(interrupted / "checkpoints" / "step-000001"))
    assert curve(tmp_path / "other", "step") == curve(whole, "step")[1:]
    assert weights(tmp_path / "other") == weights(whole)


def test_a_finished_run_taken_up_at_an_earlier_checkpoint_ends_in_the_same_bits(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "run"
    recipe = whole_recipe(folder, rows=rows, train={"save_every": 2}, output={"dir": str(folder), "keep": 9})
    report = train(recipe)
    before = weights(folder), state(folder), curve(folder, "step", "loss")
    (folder / "model" / "model.safetensors").unlink()
    again = train(recipe, resume=str(folder / "checkpoints" / "step-000002"))
    assert (again.status, again.steps) == ("done", report.steps)
    assert (weights(folder), state(folder), curve(folder, "step", "loss")) == before


def test_a_finished_run_says_so_and_changes_nothing(tmp_path: Path, rows: Path) -> None:
    recipe = whole_recipe(tmp_path / "run", rows=rows)
    report = train(recipe)
    before = files(tmp_path / "run")
    again = session(recipe, resume="auto")
    assert again.run() == report
    assert files(tmp_path / "run") == before
    assert any("finished" in text for text in again.told)  # type: ignore[attr-defined]
    shutil.rmtree(tmp_path / "run" / "model")
    train(recipe, resume="auto")
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_without_export_there_is_no_model_and_the_run_is_finished_all_the_same(tmp_path: Path, rows: Path) -> None:
    recipe = whole_recipe(tmp_path / "run", rows=rows, output={"export": False, "keep": 1}, train={"save_every": 1})
    report = train(recipe)
    assert report.model is None
    assert not (tmp_path / "run" / "model").exists()
    assert os.listdir(tmp_path / "run" / "checkpoints") == [f"step-{report.steps:06}"]
    assert train(recipe, resume="auto") == report


def test_a_checkpoint_exports_to_what_the_run_exported(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "run"
    train(whole_recipe(folder, rows=rows))
    console = session(whole_recipe(folder, rows=rows))._console
    done = export_checkpoint(folder, out=tmp_path / "out", dtype="auto", console=console, check=lambda: None)
    for file in (folder / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert done.step == json.loads((folder / "run.json").read_text())["steps"]
    export_checkpoint(done.checkpoint, out=tmp_path / "fp32", dtype="fp32", console=console, check=lambda: None)
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["dtype"] == "float32"


def test_an_export_of_a_run_that_goes_on_takes_the_newest_when_the_one_it_reads_is_pruned(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    output = {"dir": str(folder), "keep": 9}
    train(whole_recipe(folder, rows=rows, train={"save_every": 2}, output=output))
    old, middle, newest = sorted((folder / "checkpoints").iterdir())
    newest.rename(tmp_path / "newest")
    real = Checkpoint.load_into

    def pruned(self: Checkpoint, *args: Any, **options: Any) -> None:
        if self.path == middle:
            (tmp_path / "newest").rename(newest)
            remove(middle)
            remove(old)
        real(self, *args, **options)

    monkeypatch.setattr(Checkpoint, "load_into", pruned)
    made = session(whole_recipe(folder, rows=rows))
    done = export_checkpoint(folder, out=tmp_path / "out", dtype="auto", console=made._console, check=lambda: None)
    assert done.checkpoint == newest
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights(folder)
    told = made.told  # type: ignore[attr-defined]
    assert any("step-000004 was removed by its run while it was read" in text for text in told)
    assert not any("damaged" in text or "skipped" in text for text in told)
    newest.rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "newest", middle)
    with pytest.raises(UsageError, match="was removed while it was read"):
        export_checkpoint(middle, out=tmp_path / "out2", dtype="auto", console=made._console, check=lambda: None)


# -- what goes wrong --------------------------------------------------------------------------------------


def test_a_run_that_explodes_stops_with_its_last_good_state(tmp_path: Path, rows: Path) -> None:
    recipe = whole_recipe(tmp_path / "run", rows=rows, optimizer={"lr": 1e30, "schedule": "constant", "warmup": 0})
    with pytest.raises(NonFinite) as caught:
        train(recipe)
    assert caught.value.exit_code == 4
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["error"]["kind"]) == ("error", 4, "nonfinite")
    assert summary["checkpoint"].endswith(f"step-{summary['steps']:06}")
    assert all(math.isfinite(loss) for (loss,) in curve(tmp_path / "run", "loss"))
    assert str(rows) + ": row " in summary["error"]["message"]
    assert "gradient" in summary["error"]["message"]


def test_a_first_step_that_is_not_finite_leaves_nothing_to_save_and_says_so(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepNumbers, "finite", False)
    with pytest.raises(NonFinite, match="nothing was trained yet"):
        train(whole_recipe(tmp_path / "run", rows=rows))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_tokenizer_of_another_model_is_refused_before_the_first_step(tmp_path: Path, rows: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_asset("megatrain:kjv-tiny"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    recipe = whole_recipe(tmp_path / "run", rows=rows, model={"path": str(model), "init": "random"})
    with pytest.raises(DataError, match="the model knows 300"):
        session(recipe).dry_run()


def test_a_failing_overwrite_leaves_the_old_run(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "run"
    train(whole_recipe(folder, rows=rows))
    before = files(folder)
    for sections, error in (
        ({"data": {"train": str(tmp_path / "absent.jsonl")}}, DataError),
        ({"memory": {"host": 1000}}, DoesNotFit),
    ):
        with pytest.raises(error):
            train(whole_recipe(folder, rows=rows, output={"dir": str(folder), "overwrite": True}, **sections))
    assert files(folder) == before
    report = train(whole_recipe(folder, rows=rows, output={"dir": str(folder), "overwrite": True}))
    assert len(curve(folder, "step")) == report.steps


def test_a_disk_that_is_too_small_is_seen_before_the_first_step(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    with pytest.raises(DiskError, match="are free"):
        train(whole_recipe(tmp_path / "run", rows=rows))
    assert curve(tmp_path / "run", "step") == []


def test_an_interrupt_while_data_is_read(tmp_path: Path, rows: Path) -> None:
    early = session(whole_recipe(tmp_path / "run", rows=rows))
    early._stop.request(signal.SIGINT)
    with pytest.raises(Interrupted):
        early.run()
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["checkpoint"]) == ("interrupted", 130, None)
    assert not (tmp_path / "run" / "lock").exists()
    train(whole_recipe(tmp_path / "run", rows=rows))  # nothing was trained: not another run


def test_a_failing_step_saves_what_was_reached(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    from megatrain.stream.executor import StreamingExecutor

    real, calls = StreamingExecutor.train_step, iter(range(1, 100))

    def failing(self: Any, batches: Any, *, seed: int) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return real(self, batches, seed=seed)

    monkeypatch.setattr(StreamingExecutor, "train_step", failing)
    with pytest.raises(DoesNotFit, match="Tried to allocate"):
        train(whole_recipe(tmp_path / "run", rows=rows))
    monkeypatch.undo()
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-000002"]
    train(whole_recipe(tmp_path / "run", rows=rows), resume="auto")
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "disk"),
        (MemoryError(), 3, "does_not_fit"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"), 3, "does_not_fit"),
        (RuntimeError("can't start new thread"), 3, "does_not_fit"),
        (OSError(errno.EFBIG, "File too large"), 3, "disk"),
        (OSError(errno.ECHILD, "No child processes"), 1, "internal"),
    ],
)
def test_what_the_machine_lacks_is_no_bug_of_ours(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, kind: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(prospect, "prepare", fail)
    with pytest.raises((DiskError, DoesNotFit, OSError, RuntimeError)) as caught:
        train(whole_recipe(tmp_path / "run", rows=rows))
    assert getattr(caught.value, "exit_code", 1) == code
    summary = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (summary["exit_code"], summary["error"]["kind"]) == (code, kind)


@pytest.mark.parametrize("name", ["metrics.jsonl", "recipe.yaml", "run.json"])
def test_a_folder_where_a_file_of_the_run_belongs_is_no_bug_of_ours(tmp_path: Path, rows: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    blocked = session(whole_recipe(tmp_path / "run", rows=rows))
    with pytest.raises(DiskError, match="Is a directory"):
        blocked.run()


def test_what_run_json_cannot_take_is_still_told(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: RunDir, summary: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "write_summary", full)
    interrupted = session(whole_recipe(tmp_path / "run", rows=rows), on_event=stop_after(2))
    with pytest.raises(Interrupted):
        interrupted.run()
    assert (interrupted.summary["steps"], interrupted.summary["exit_code"]) == (2, 143)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_checkpoint_whose_plan_is_of_another_version_can_be_resumed(tmp_path: Path, rows: Path, whole: Path) -> None:
    with pytest.raises(Interrupted):
        train(whole_recipe(tmp_path / "run", rows=rows), on_event=stop_after(2))
    file = next((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))
    manifest = Manifest.from_text(file.read_text())
    file.write_text(dataclasses.replace(manifest, identity=dataclasses.replace(manifest.identity, plan={})).to_text())
    train(whole_recipe(tmp_path / "run", rows=rows), resume="auto")
    assert weights(tmp_path / "run") == weights(whole)


def test_dry_run_writes_nothing_and_fails_like_the_run(tmp_path: Path, rows: Path) -> None:
    recipe = whole_recipe(tmp_path / "run", rows=rows)
    outlook = session(recipe).dry_run()
    assert not (tmp_path / "run").exists()
    assert outlook["steps"] == train(recipe).steps
    with pytest.raises(UsageError, match="holds another run"):
        session(recipe).dry_run()
    with pytest.raises(DoesNotFit):
        session(whole_recipe(tmp_path / "other", rows=rows, memory={"host": 1000})).dry_run()
    with pytest.raises(RecipeError, match="warm-up"):
        session(whole_recipe(tmp_path / "other", rows=rows, optimizer={"warmup": 1000})).dry_run()
    assert not (tmp_path / "other").exists()


def test_saves_are_reported_where_they_are(tmp_path: Path, rows: Path) -> None:
    saved: list[SaveReport] = []
    train(
        whole_recipe(tmp_path / "run", rows=rows, train={"save_every": 2}),
        on_event=lambda event, stop: saved.append(event) if isinstance(event, SaveReport) else None,
    )
    assert [Path(event.path).name for event in saved][:2] == ["step-000002", "step-000004"]
    assert all(event.bytes > 1_000_000 for event in saved)


def test_a_checkpoint_is_counted_to_the_byte_before_weights_are_read(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's figure is that of the files, and a disk without that room is refused by the dry run too."""
    train(whole_recipe(tmp_path / "run", rows=rows))
    planned = prospect.plan_run(recipe := whole_recipe(tmp_path / "run", rows=rows), config=read_config(recipe))
    written = max((tmp_path / "run" / "checkpoints").iterdir())
    tensors = 0
    for file in written.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors += sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
    assert checkpoint_bytes(planned.model.sizes) == tensors
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2_000_000))
    with pytest.raises(DiskError, match="checkpoint"):
        session(whole_recipe(tmp_path / "other", rows=rows)).dry_run()
