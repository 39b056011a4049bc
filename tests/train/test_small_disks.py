"""Whole runs on really small disks, a tmpfs of a few MiB: what does not fit is refused before a weight is read.

A checkpoint of the model takes 12.0 MiB and its export 2.0; for what lies beside them 4 MiB more are asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from whole import curve, session, state, train, weights, whole_recipe, write_rows

from megatrain.errors import DiskError
from megatrain.report.events import SaveReport, StepReport
from megatrain.train import build, checkpoint_writer
from megatrain.train.checkpoint import find_checkpoints

MIB = 1 << 20
SAVING: dict[str, Any] = {"train": {"save_every": 2}}
FOUR: dict[str, Any] = {"train": {"save_every": 2, "steps": 4, "epochs": None}}
MakeDisk = Callable[[int], Path]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "RETRY_WAITS_S", (0.01, 0.01))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[MakeDisk]:
    """Mounts a tmpfs of so many MiB."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", str(folder)], check=False, capture_output=True
        )
        if done.returncode:
            pytest.skip("no right to mount (test_in_a_user_namespace tries another way)")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Somebody else's file takes all that is left."""
    (disk / "ballast").write_bytes(b"x" * shutil.disk_usage(disk).free)
    assert shutil.disk_usage(disk).free < MIB


@pytest.mark.parametrize(
    ("size", "sections", "words"),
    [
        (15, {}, "a checkpoint takes 12"),  # one checkpoint does not fit
        (17, {}, "the exported model 2"),  # nor the export beside it
        (27, SAVING, "the one before stays until it is whole"),  # nor the second checkpoint
        (26, SAVING | {"output": {"export": False}}, "28.0 MiB of disk are needed"),
    ],
)
def test_what_cannot_end_is_refused_before_a_weight_is_read(
    make_disk: MakeDisk, rows: Path, monkeypatch: pytest.MonkeyPatch, size: int, sections: dict[str, Any], words: str
) -> None:
    def never(*args: object, **options: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(build, "load_pretrained", never)
    disk = make_disk(size)
    output = {"output": {"dir": str(disk / "run")} | sections.get("output", {})}
    recipe = whole_recipe(disk / "run", rows=rows, **(sections | output))
    for attempt in (lambda: session(recipe).dry_run(), lambda: session(recipe).run()):
        with pytest.raises(DiskError, match=words) as caught:
            attempt()
        assert caught.value.exit_code == 3
        assert caught.value.hint == "make room, or choose another disk with --output-dir"
    assert not (disk / "run" / "checkpoints").exists()


def test_full_at_the_first_checkpoint(make_disk: MakeDisk, rows: Path) -> None:
    """Somebody fills the disk after the run has begun: nothing is saved, and that is said."""
    disk = make_disk(64)

    def fills(event: Any, stop: object) -> None:
        if isinstance(event, StepReport) and event.step == 1:
            fill(disk)

    made = session(whole_recipe(disk / "run", rows=rows, **SAVING), on_event=fills)
    with pytest.raises(DiskError, match="there is no earlier checkpoint") as caught:
        made.run()
    assert caught.value.exit_code == 3
    assert caught.value.hint is not None
    assert "--resume" not in caught.value.hint
    assert find_checkpoints(disk / "run" / "checkpoints").usable == ()
    assert any("trying again" in text or "given up" in text for text in made.told)  # type: ignore[attr-defined]
    (disk / "ballast").unlink()
    train(whole_recipe(disk / "run", rows=rows, **SAVING), resume="auto")


def test_full_at_the_second_checkpoint(make_disk: MakeDisk, rows: Path, tmp_path: Path) -> None:
    """The first is intact, and once there is room a resume ends with the bits of a run that nobody disturbed."""
    disk = make_disk(64)

    def fills(event: Any, stop: object) -> None:
        if isinstance(event, SaveReport) and event.step == 2:
            fill(disk)

    with pytest.raises(DiskError, match="step-000002 is intact") as caught:
        train(whole_recipe(disk / "run", rows=rows, **FOUR), on_event=fills)
    assert caught.value.exit_code == 3
    assert "--resume auto" in str(caught.value.hint)
    (disk / "ballast").unlink()
    train(whole_recipe(disk / "run", rows=rows, **FOUR), resume="auto")
    train(whole_recipe(tmp_path / "whole", rows=rows, **FOUR))
    assert weights(disk / "run") == weights(tmp_path / "whole")
    assert state(disk / "run") == state(tmp_path / "whole")
    assert curve(disk / "run", "step", "loss") == curve(tmp_path / "whole", "step", "loss")


def test_with_the_least_room_a_run_ends_and_older_checkpoints_go(make_disk: MakeDisk, rows: Path) -> None:
    """Two checkpoints and no more: the third makes the oldest go, and so does the export."""
    disk = make_disk(29)

    def fills(event: Any, stop: object) -> None:
        if isinstance(event, SaveReport) and event.step == 6:
            (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - 5 * MIB))

    made = session(whole_recipe(disk / "run", rows=rows, **SAVING), on_event=fills)
    assert made.run().status == "done"
    told = [text for text in made.told if "goes before its time" in text]  # type: ignore[attr-defined]
    assert ["one more checkpoint" in text for text in told] == [True, False]
    assert "the exported model" in told[-1]
    assert any("output.keep=2 keeps" in text for text in made.told)  # type: ignore[attr-defined]
    assert [found.state.step for found in find_checkpoints(disk / "run" / "checkpoints").usable] == [6]


def test_a_resume_asks_for_less_than_a_fresh_run(make_disk: MakeDisk, rows: Path) -> None:
    """What it goes on from is on the disk already."""
    disk = make_disk(33)
    once = {
        "train": {"save_every": 2, "steps": 2, "epochs": None},
        "output": {"dir": str(disk / "run"), "export": False},
    }
    train(whole_recipe(disk / "run", rows=rows, **once))
    more = once | {"train": {"save_every": 2, "steps": 4, "epochs": None}}
    assert train(whole_recipe(disk / "run", rows=rows, **more), resume="auto").steps == 4
    (disk / "ballast").write_bytes(b"x" * (8 * MIB))
    most = once | {"train": {"save_every": 2, "steps": 6, "epochs": None}}
    with pytest.raises(DiskError, match="the one before stays until it is whole"):
        session(whole_recipe(disk / "run", rows=rows, **most), resume="auto").dry_run()


@pytest.mark.slow
def test_the_exit_code_and_the_last_line_of_a_process(make_disk: MakeDisk, rows: Path) -> None:
    disk = make_disk(26)
    command = [sys.executable, "-m", "megatrain", "finetune", "quickstart", "--json", "--set", f"data.train={rows}"]
    command += ["--set", "train.save_every=2", "--output-dir", str(disk / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, told["exit_code"], told["error"]["kind"]) == (3, 3, "disk"), done.stderr
    assert "of disk are needed" in told["error"]["message"]


@pytest.mark.slow
def test_in_a_user_namespace() -> None:
    """Who may not mount may do so where he is root: the tests above, once more."""
    inside = ["unshare", "-rm"]
    if os.geteuid() == 0 or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("root needs none, or there are no user namespaces here")
    command = [*inside, sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
