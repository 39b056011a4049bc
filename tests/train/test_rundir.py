"""Who may write in a run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatrain.errors import DiskError, UsageError
from megatrain.train.manifest import Damaged, read_manifest
from megatrain.train.rundir import RunDir

HOLDER = """
import sys, time
from pathlib import Path
from megatrain.train.rundir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_is_gone_after_use_and_can_be_taken_again(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "deep" / "run")
    for _ in range(2):
        with rundir.locked():
            assert str(os.getpid()) in rundir.lock.read_text()
        assert not rundir.lock.exists()


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock_behind(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(rundir.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    for attempt in (rundir.locked().__enter__, rundir.check_unlocked):
        with pytest.raises(UsageError, match=f"in use by .* process {holder.pid}"):
            attempt()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    rundir.check_unlocked()
    with rundir.locked():
        pass


def test_a_file_in_the_way_and_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="is not a folder"), RunDir(path).locked():
            pass
        with pytest.raises(UsageError, match="is not a folder"):
            RunDir(path).check_unlocked()
    RunDir(tmp_path / "not" / "yet").check_unlocked()
    assert not (tmp_path / "not").exists()

    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(DiskError, match="Read-only file system"), RunDir(tmp_path / "run").locked():
        pass


def test_a_dry_run_sees_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for path in (tmp_path, tmp_path / "deep" / "run"):
        with pytest.raises(DiskError, match="Permission denied"):
            RunDir(path).check_unlocked()


def test_what_cannot_be_written_whole_leaves_the_old_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path)
    rundir.write_summary({"status": "old"})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        rundir.write_summary({"status": "new"})
    assert rundir.read_summary() == {"status": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_counts_as_a_run(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    assert not rundir.holds_run()
    rundir.write_recipe("a: 1\n")  # it failed before the first step: nothing to lose
    rundir.metrics.write_text("")
    rundir.checkpoints.mkdir()
    (rundir.checkpoints / ".step-000004.partial").mkdir()
    rundir.write_summary({"status": "error"})
    assert not rundir.holds_run()
    for make in (
        lambda: rundir.metrics.write_text("{}\n"),
        lambda: rundir.model.mkdir(),
        lambda: (rundir.checkpoints / "step-000004").mkdir(parents=True),
        lambda: rundir.write_summary({"status": "done"}),
    ):
        rundir.clear()
        assert not rundir.holds_run()
        make()
        assert rundir.holds_run()


def test_clear_removes_only_what_is_ours(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "läuft  hier")
    rundir.path.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep")
    (rundir.path / "notes.txt").write_text("mine")
    rundir.model.symlink_to(elsewhere)
    rundir.write_recipe("a: 1\n")
    rundir.clear()
    assert (rundir.path / "notes.txt").read_text() == "mine"
    assert (elsewhere / "precious").read_text() == "keep"
    assert not rundir.recipe.exists()


def test_a_broken_summary_is_no_summary(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    assert rundir.read_summary() == {}
    rundir.summary.write_text('{"status": "do')
    assert rundir.read_summary() == {}
    rundir.write_summary({"status": "done", "wall_s": time.time()})
    assert rundir.read_summary()["status"] == "done"


@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, link: bool) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.model.mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    for path in (rundir.summary, rundir.recipe, rundir.model / "config.json"):
        path.symlink_to(tmp_path / "pipe") if link else os.mkfifo(path)
    assert (rundir.read_summary(), rundir.read_recipe(), rundir.exported_dtype()) == ({}, None, None)
    checkpoint = rundir.checkpoints / "step-000001"
    checkpoint.mkdir(parents=True)
    os.mkfifo(checkpoint / "manifest.json")
    with pytest.raises(Damaged, match="is no file"):
        read_manifest(checkpoint)
    rundir.summary.unlink()
    rundir.summary.mkdir()
    assert rundir.read_summary() == {}
