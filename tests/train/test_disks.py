"""Whole runs on disks that misbehave: what was trained is safe, or it is said that it is not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import start, write_recipe
from faults import Fault
from whole import curve, session, state, train, weights, whole_recipe, write_rows

from megatrain.errors import DiskError
from megatrain.report.events import SaveReport, StepReport
from megatrain.train import checkpoint_writer
from megatrain.train.checkpoint import find_checkpoints
from megatrain.train.rundir import RunDir

SAVING: dict[str, Any] = {"train": {"save_every": 2}}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "RETRY_WAITS_S", (0.01, 0.01, 0.01))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train(whole_recipe(folder, rows=write_rows(folder / "rows.jsonl"), **SAVING))
    return folder


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than the data, the model and the temporary files."""
    folder = Path("/dev/shm") / f"megatrain tests ünicode {os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def fail(monkeypatch: pytest.MonkeyPatch, *faults: str) -> None:
    for text in faults:
        fault = Fault.parse(text)
        monkeypatch.setattr(os, fault.call, getattr(os, fault.call))  # put back at the end
        fault.install()


def same(run: Path, whole: Path) -> bool:
    return (weights(run), state(run), curve(run, "step", "loss")) == (
        weights(whole),
        state(whole),
        curve(whole, "step", "loss"),
    )


@pytest.mark.parametrize(("call", "error"), [("pwritev", "ENOSPC"), ("pwritev", "EDQUOT"), ("fsync", "EIO")])
def test_a_disk_that_fails_once_in_a_checkpoint_costs_nothing(
    tmp_path: Path, rows: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: str
) -> None:
    fail(monkeypatch, f"{call}:{error}:4:1:/checkpoints/")
    made = session(whole_recipe(tmp_path / "run", rows=rows, **SAVING))
    made.run()
    told = made.told  # type: ignore[attr-defined]
    assert any("trying again" in text or "given up" in text for text in told)
    assert same(tmp_path / "run", whole)


def test_a_disk_that_stays_full_ends_the_run_with_the_old_checkpoint_and_a_resume_is_exact(
    tmp_path: Path, rows: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first write of the second checkpoint on."""
    made = session(
        whole_recipe(tmp_path / "run", rows=rows, **SAVING),
        on_event=lambda event, stop: (
            fail(monkeypatch, "pwritev:ENOSPC:1:inf:/checkpoints/") if isinstance(event, SaveReport) else None
        ),
    )
    with pytest.raises(DiskError, match="step-000002 is intact") as caught:
        made.run()
    assert caught.value.exit_code == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["error"]["kind"] == "disk"
    monkeypatch.undo()
    train(whole_recipe(tmp_path / "run", rows=rows, **SAVING), resume="auto")
    assert same(tmp_path / "run", whole)


def test_a_full_disk_under_metrics_jsonl_loses_no_line_once_there_is_room(
    tmp_path: Path, rows: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "pwrite:ENOSPC:2:3:metrics.jsonl")
    made = session(whole_recipe(tmp_path / "run", rows=rows, **SAVING))
    made.run()
    told = made.told  # type: ignore[attr-defined]
    assert sum("kept in memory meanwhile" in text for text in told) == 1
    assert same(tmp_path / "run", whole)


def test_a_checkpoints_folder_that_vanishes_is_made_again(tmp_path: Path, rows: Path, whole: Path) -> None:
    def vanish(event: Any, stop: object) -> None:
        if isinstance(event, StepReport) and event.step == 3:
            shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)

    train(whole_recipe(tmp_path / "run", rows=rows, **SAVING), on_event=vanish)
    assert same(tmp_path / "run", whole)
    assert all(found.state.step in (4, 6) for found in find_checkpoints(tmp_path / "run" / "checkpoints").usable)


def test_a_run_folder_that_vanishes_is_no_bug_of_ours(tmp_path: Path, rows: Path, whole: Path) -> None:
    """The weights are saved where it was; what cannot be written any more is said."""

    def vanish(event: Any, stop: object) -> None:
        if isinstance(event, StepReport) and event.step == 5:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    recipe = whole_recipe(tmp_path / "run", rows=rows, **SAVING)
    made = session(recipe, on_event=vanish)
    assert made.run().status == "done"
    told = made.told  # type: ignore[attr-defined]
    assert sum("recipe.yaml was removed; it is written again" in text for text in told) == 1
    assert sum("metrics.jsonl was removed; its lines are written again" in text for text in told) == 1
    assert curve(tmp_path / "run", "step", "loss") == curve(whole, "step", "loss")
    assert (tmp_path / "run" / "recipe.yaml").read_text() == recipe.to_yaml()
    assert weights(tmp_path / "run") == weights(whole)
    assert state(tmp_path / "run") == state(whole)


def test_a_run_that_is_done_but_for_run_json_says_so(
    tmp_path: Path, rows: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunDir, summary: dict[str, Any]) -> None:
        if summary["status"] == "done":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "write_summary", full)
    recipe = whole_recipe(tmp_path / "run", rows=rows, **SAVING)
    with pytest.raises(DiskError, match="No space left on device; the run is done") as caught:
        train(recipe)
    assert caught.value.exit_code == 3
    monkeypatch.undo()
    assert train(recipe, resume="auto").status == "done"
    assert same(tmp_path / "run", whole)


def test_another_volume_with_spaces_and_unicode_in_its_name(elsewhere: Path, rows: Path, whole: Path) -> None:
    assert elsewhere.stat().st_dev != rows.stat().st_dev
    train(whole_recipe(elsewhere / "mein lauf", rows=rows, **SAVING))
    assert same(elsewhere / "mein lauf", whole)


def test_a_slow_disk_is_written_to_while_training_goes_on(
    tmp_path: Path, rows: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "pwritev:0.01:1:inf:/checkpoints/")
    train(whole_recipe(tmp_path / "run", rows=rows, **SAVING))
    assert same(tmp_path / "run", whole)
    saves = curve(tmp_path / "run", "step", "stall_s", "save_s", kind="save")
    assert [step for step, _, _ in saves] == [2, 4, 6]
    assert all(stall_s is not None and save_s > 0 for _, stall_s, save_s in saves)


# -- real limits, in processes of their own ---------------------------------------------------------------


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_a_disk_error(tmp_path: Path, rows: Path) -> None:
    """RLIMIT_FSIZE: the kernel refuses the write (EFBIG)."""
    recipe = write_recipe(tmp_path, rows=rows)
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    program += "from megatrain.train import checkpoint_writer; checkpoint_writer.RETRY_WAITS_S = ()\n"
    program += "from megatrain.cli.main import main; main()"
    command = [sys.executable, "-c", program, "finetune", str(recipe), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["error"]["kind"]) == (3, "disk"), done.stderr
    assert "File too large" in told["error"]["message"]


@pytest.mark.slow
def test_a_small_disk_that_is_really_full(tmp_path: Path, rows: Path) -> None:
    """30 MiB hold two checkpoints of 12: the third makes the oldest go before its time, and the run ends well."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=31m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        recipe = write_recipe(disk, rows=rows)
        process = start(recipe, "--json")
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert "goes before its time" in err
        assert json.loads(out)["status"] == "done"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
