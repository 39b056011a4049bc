"""Checkpoints: whole or not at all, damage is seen, a full disk costs nothing that was saved."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import IDENTITY, RecordingConsole, bits, stage, tiny_store

from megatrain.errors import DiskError
from megatrain.host.store import HostStore
from megatrain.plan.disk import SPARE_BYTES
from megatrain.train import checkpoint_writer
from megatrain.train.checkpoint import Checkpoint, find_checkpoints, state_bytes
from megatrain.train.checkpoint_writer import CheckpointWriter
from megatrain.train.manifest import Damaged, Manifest
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState


def writer(folder: Path, *, keep: int = 2, waits: tuple[float, ...] = (), store: HostStore | None = None) -> Any:
    console = RecordingConsole()
    made = CheckpointWriter(
        folder,
        store=store or tiny_store(),
        identity=IDENTITY,
        keep=keep,
        console=console,
        stop=StopFlag(),
        retry_waits_s=waits,
    )
    made.console = console  # type: ignore[attr-defined]
    return made


def load(found: Checkpoint, store: HostStore) -> None:
    found.load_into(store, console=RecordingConsole(), check=lambda: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1)
    run.train()
    (found,) = find_checkpoints(tmp_path / "checkpoints").usable
    assert found.manifest.identity == IDENTITY
    assert found.state == run.trainer.state
    other = tiny_store(seed=5)
    assert bits(other) != bits(run.store)
    load(found, other)
    assert bits(other) == bits(run.store)
    headers = 4 * 1024
    assert state_bytes(run.store) < found.manifest.total_bytes < state_bytes(run.store) + headers


def test_state_survives_json_exactly() -> None:
    state = TrainState(7, 1, 2, 1 / 3, 100, 50, 1, 0.1 + 0.2, 2.0, 1e-17, 5e-324, 6)
    manifest = Manifest(state, IDENTITY, {})
    assert Manifest.from_text(manifest.to_text()) == manifest


def test_keep_counts_the_newest(tmp_path: Path) -> None:
    save = writer(tmp_path, keep=2).save
    for step in (5, 10, 1000000):
        save(TrainState(step=step))
    assert names(tmp_path) == ["step-000010", "step-1000000"]


def test_a_future_that_was_given_up_goes_when_the_next_one_is_safe(tmp_path: Path) -> None:
    """Resumed from step 5 by hand although 10 exists: 10 stays until 7 is on the disk."""
    made = writer(tmp_path, keep=3)
    made.save(TrainState(step=5))
    made.save(TrainState(step=10))
    made.save(TrainState(step=7))
    assert names(tmp_path) == ["step-000005", "step-000007"]


def cut_off(path: Path) -> None:
    file = path / "0001-layer-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    file = path / "0002-layer-1.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose_a_file(path: Path) -> None:
    (path / "0000-stem.safetensors").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_the_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_text(file.read_text()[:-20])


def edit_the_manifest(path: Path) -> None:
    file = path / "manifest.json"
    body = json.loads(file.read_text())
    body["state"]["index"] += 1
    file.write_text(json.dumps(body))


def no_object(path: Path) -> None:
    (path / "manifest.json").write_text("[]")


def binary_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes(os.urandom(100))


def nested_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


STRUCTURAL = [cut_off, lose_a_file, lose_the_manifest, cut_the_manifest, edit_the_manifest, no_object, binary_manifest]
STRUCTURAL += [nested_manifest]


@pytest.mark.parametrize("damage", STRUCTURAL)
def test_a_damaged_one_is_skipped_by_name_and_the_one_before_is_found(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    made = writer(tmp_path)
    made.save(TrainState(step=1))
    made.save(TrainState(step=2))
    damage(tmp_path / "step-000002")
    found = find_checkpoints(tmp_path)
    assert [c.path.name for c in found.usable] == ["step-000001"]
    assert [s.path.name for s in found.skipped] == ["step-000002"]
    assert found.skipped[0].reason
    made.save(TrainState(step=2))  # trained again: the damaged one is replaced
    assert [c.path.name for c in find_checkpoints(tmp_path).usable] == ["step-000002", "step-000001"]


def test_a_flipped_bit_shows_when_it_is_read(tmp_path: Path) -> None:
    writer(tmp_path).save(TrainState(step=1))
    flip_a_bit(tmp_path / "step-000001")
    (found,) = find_checkpoints(tmp_path).usable
    with pytest.raises(Damaged, match=r"0002-layer-1\.safetensors"):
        load(found, tiny_store())


def test_a_manifest_may_not_point_outside(tmp_path: Path) -> None:
    writer(tmp_path).save(TrainState(step=1))
    (found,) = find_checkpoints(tmp_path).usable
    for name in ("../step-000001/0000-stem.safetensors", str(tmp_path / "step-000001" / "0000-stem.safetensors")):
        files = {name: found.manifest.files["0000-stem.safetensors"]}
        (found.path / "manifest.json").write_text(Manifest(found.state, IDENTITY, files).to_text())
        with pytest.raises(Damaged, match="outside"):
            Checkpoint.open(found.path)


def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    store = tiny_store()
    writer(tmp_path, store=HostStore(store.units[:-1], store.arena)).save(TrainState(step=1))
    (found,) = find_checkpoints(tmp_path).usable
    with pytest.raises(Damaged, match="not the units of this model"):
        load(found, store)


@pytest.mark.parametrize("point", ["write_unit", "rename", "force"])
def test_killed_at_any_point_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    made = writer(tmp_path)
    made.save(TrainState(step=1))

    class Killed(BaseException):
        pass

    def kill(*args: object, **kwargs: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if point == "rename":
            patch.setattr(Path, "rename", kill)
        else:
            patch.setattr(checkpoint_writer, "write_unit" if point == "write_unit" else "_force", kill)
        with pytest.raises(Killed):
            made.save(TrainState(step=2))
    assert ".step-000002.partial" in names(tmp_path)
    assert [c.state.step for c in find_checkpoints(tmp_path).usable] == [1]
    writer(tmp_path).save(TrainState(step=2))
    assert names(tmp_path) == ["step-000001", "step-000002"]


# -- disks ------------------------------------------------------------------------------------------------


def failing(times: int, error: int) -> Callable[..., Any]:
    real, left = checkpoint_writer.write_unit, [times]

    def write_unit(path: Path, unit: Any, **options: Any) -> Any:
        if left[0] and unit.unit.index == 2:
            left[0] -= 1
            path.write_bytes(b"half")
            raise OSError(error, os.strerror(error))
        return real(path, unit, **options)

    return write_unit


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_disk_that_recovers_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    made = writer(tmp_path, waits=(0.01, 0.01, 0.01))
    made.save(TrainState(step=1))
    monkeypatch.setattr(checkpoint_writer, "write_unit", failing(2, error))
    made.save(TrainState(step=2))
    assert names(tmp_path) == ["step-000001", "step-000002"]
    warnings = [text for text in made.console.told if text.startswith("warning")]
    assert len(warnings) == 2
    assert os.strerror(error) in warnings[0]


def test_a_disk_that_stays_full_keeps_the_old_one_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer(tmp_path, waits=(0.01,), keep=1)
    made.save(TrainState(step=1))
    monkeypatch.setattr(checkpoint_writer, "write_unit", failing(9, errno.ENOSPC))
    with pytest.raises(DiskError, match=r"step 2 .*No space left on device.*step-000001 is intact") as caught:
        made.save(TrainState(step=2))
    assert caught.value.exit_code == 3
    assert names(tmp_path) == ["step-000001"]


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(checkpoint_writer, "write_unit", lambda *args, **options: pytest.fail("written without space"))
    with pytest.raises(DiskError, match=r"1000 bytes are free.*there is no earlier checkpoint") as caught:
        made.save(TrainState(step=2))
    assert caught.value.hint == "make room on the disk and start again: nothing that was trained is on it"


def roomy(monkeypatch: pytest.MonkeyPatch, folder: Path, *, checkpoints: int) -> None:
    """A disk that has room for so many checkpoints of the tiny store and a little more."""
    usage, one = shutil.disk_usage(folder), state_bytes(tiny_store()) + SPARE_BYTES

    def disk_usage(path: Path) -> Any:
        return usage._replace(free=one * (checkpoints - len(list(folder.glob("*-0*")))) + 1000)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


@pytest.mark.parametrize(("room", "left"), [(3, [10, 15]), (2, [10, 15]), (1, [5])])
def test_two_are_kept_where_three_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, left: list[int]
) -> None:
    """The oldest goes first if it must; the last one that is left never does."""
    made = writer(tmp_path, keep=2)
    roomy(monkeypatch, tmp_path, checkpoints=room)
    made.save(TrainState(step=5))
    for step in (10, 15):
        if room == 1:
            with pytest.raises(DiskError, match="step-000005 is intact"):
                made.save(TrainState(step=step))
        else:
            made.save(TrainState(step=step))
    assert [c.state.step for c in find_checkpoints(tmp_path).usable] == left[::-1]
    told = [text for text in made.console.told if "goes before its time" in text]
    assert [text.split("; ")[1].split()[0] for text in told] == (["step-000005"] if room == 2 else [])


def test_where_room_is_short_a_damaged_one_goes_and_the_usable_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = writer(tmp_path, keep=2)
    made.save(TrainState(step=5))
    made.save(TrainState(step=10))
    cut_off(tmp_path / "step-000010")
    roomy(monkeypatch, tmp_path, checkpoints=2)
    made.save(TrainState(step=15))
    assert names(tmp_path) == ["step-000005", "step-000015"]


def test_the_weights_digest_is_of_the_masters_alone(tmp_path: Path) -> None:
    store = tiny_store()
    made = writer(tmp_path, store=store, keep=9)
    first = made.save(TrainState(step=1)).weights_sha256
    store.stem.exp_avg += 1
    store.stem.steps += 1
    assert made.save(TrainState(step=2)).weights_sha256 == first
    store.layers[1].lo[3] += 1
    assert made.save(TrainState(step=3)).weights_sha256 != first
    assert len({c.manifest.weights_sha256 for c in find_checkpoints(tmp_path).usable}) == 2


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    made = writer(tmp_path / "run" / "checkpoints")
    made.save(TrainState(step=1))
    shutil.rmtree(tmp_path / "run")
    made.save(TrainState(step=2))
    assert [c.state.step for c in find_checkpoints(tmp_path / "run" / "checkpoints").usable] == [2]


def test_an_interrupt_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = writer(tmp_path, waits=(0.01, 600.0))
    monkeypatch.setattr(checkpoint_writer, "write_unit", failing(9, errno.ENOSPC))
    made.console.warn = lambda text: made._stop.request(15)
    with pytest.raises(DiskError):
        made.save(TrainState(step=2))


def test_the_expected_time_is_told_once_the_speed_is_known(tmp_path: Path) -> None:
    made = writer(tmp_path)
    made.save(TrainState(step=1))
    made.save(TrainState(step=2))
    first, second = made.console.told
    assert "writing the checkpoint of step 1: " in first
    assert "about 0:" in second


def test_the_first_cause_is_told_with_what_it_led_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor for a file, and none to remove what was begun either."""

    def none_left(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    made = writer(tmp_path, waits=(0.0, 0.0))
    monkeypatch.setattr(checkpoint_writer, "write_unit", none_left)
    monkeypatch.setattr(shutil, "rmtree", none_left)
    with pytest.raises(DiskError, match="Too many open files") as caught:
        made.save(TrainState(step=1))
    assert "File exists" not in caught.value.message
    assert all("Too many open files" in text for text in made.console.told if "trying again" in text)
    monkeypatch.setattr(made, "_remove_partial", lambda: None)
    with pytest.raises(DiskError, match="File exists"):
        made.save(TrainState(step=1))
    (tmp_path / ".step-000001.partial").rmdir()
    with pytest.raises(DiskError, match="File exists; at first: Too many open files"):
        made.save(TrainState(step=1))
