"""Output folders in which somebody put links: nothing is written, emptied or removed through one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole import session, train, weights, whole_recipe, write_rows

from megatrain.cli.output import _write_crash
from megatrain.errors import UsageError
from megatrain.files import open_own, write_whole
from megatrain.train.checkpoint import find_checkpoints

SECRET = "not to be touched\n"
TWO_STEPS: dict[str, Any] = {"steps": 2, "epochs": None}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file outside the folder, which has to be as it was in the end."""
    path = tmp_path / "victim"
    path.write_text(SECRET)
    yield path
    assert path.read_text() == SECRET


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "crash.txt", "wandb-id"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_place_of_a_file_is_refused_before_anything_is_read(
    tmp_path: Path, rows: Path, victim: Path, name: str, dangling: bool
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    target = tmp_path / "absent" if dangling else victim
    (folder / name).symlink_to(target)
    for attempt in (session(whole_recipe(folder, rows=rows)).run, session(whole_recipe(folder, rows=rows)).dry_run):
        with pytest.raises(UsageError, match=f"{name}: is a link to {target}") as caught:
            attempt()
        assert caught.value.exit_code == 2
        assert "remove it" in str(caught.value.hint)
    assert not (tmp_path / "absent").exists()
    assert os.listdir(folder) == [name]


def test_links_in_the_place_of_what_is_replaced_go_and_lead_nowhere(tmp_path: Path, rows: Path, victim: Path) -> None:
    """Files and folders that are written aside and renamed, and the names that they have meanwhile."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (folder / "checkpoints").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "kept").write_text(SECRET)
    for name in ("recipe.yaml", "run.json", "recipe.yaml.partial", "run.json.partial", "metrics.jsonl.partial"):
        (folder / name).symlink_to(victim)
    (folder / ".model.partial").symlink_to(elsewhere)
    (folder / ".model.old").symlink_to(elsewhere)
    (folder / "checkpoints" / ".step-000002.partial").symlink_to(elsewhere)
    assert train(whole_recipe(folder, rows=rows, train=TWO_STEPS)).status == "done"
    assert os.listdir(elsewhere) == ["kept"]
    assert (folder / "run.json").is_file()
    assert [path.name for path in folder.rglob("*") if path.is_symlink()] == ["metrics.jsonl.partial"]  # nothing to cut
    assert [found.state.step for found in find_checkpoints(folder / "checkpoints").usable] == [2]


def test_a_checkpoint_that_is_a_link_is_not_removed_where_it_lies(tmp_path: Path, rows: Path) -> None:
    """Links to another run's checkpoints, of a step before and of one that this run is to write."""
    other, folder = tmp_path / "other", tmp_path / "run"
    for run in (other, folder):
        train(whole_recipe(run, rows=rows, train=TWO_STEPS))
    before = {path: path.read_bytes() for path in (other / "checkpoints").rglob("*") if path.is_file()}
    (folder / "checkpoints" / "step-000001").symlink_to(other / "checkpoints" / "step-000002")
    (folder / "checkpoints" / "step-000003").symlink_to(tmp_path / "absent")
    report = train(whole_recipe(folder, rows=rows, train=TWO_STEPS | {"steps": 3}), resume="auto")
    assert report.steps == 3
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-000002", "step-000003"]


def test_a_model_folder_that_is_a_link_is_replaced_not_emptied(tmp_path: Path, rows: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    train(whole_recipe(folder, rows=rows, train=TWO_STEPS))
    (folder / "model").rename(elsewhere)
    before = (elsewhere / "model.safetensors").read_bytes()
    (folder / "model").symlink_to(elsewhere)
    train(whole_recipe(folder, rows=rows, train=TWO_STEPS | {"steps": 3}), resume="auto")
    assert (elsewhere / "model.safetensors").read_bytes() == before
    assert not (folder / "model").is_symlink()
    assert weights(folder) != before


def test_a_folder_that_is_a_link_itself_is_where_its_owner_wants_it(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big disk")
    (tmp_path / "big disk" / "checkpoints of mine").mkdir()
    (tmp_path / "big disk" / "checkpoints").symlink_to("checkpoints of mine")
    assert train(whole_recipe(tmp_path / "run", rows=rows, train=TWO_STEPS)).status == "done"
    assert len(find_checkpoints(tmp_path / "big disk" / "checkpoints of mine").usable) == 1
    more = TWO_STEPS | {"steps": 3}
    assert train(whole_recipe(tmp_path / "run", rows=rows, train=more), resume="auto").status == "done"


def test_what_is_no_file_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UsageError, match="is no file"):
        open_own(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    with pytest.raises(IsADirectoryError):
        open_own(tmp_path, os.O_RDWR)


def test_a_crash_report_follows_no_link(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the run's folder nor among the temporary files, where anybody may write."""
    (tmp_path / "crash.txt").symlink_to(victim)
    path = _write_crash("what happened", folder=tmp_path)
    assert path is not None
    assert path.read_text() == "what happened"
    assert not path.is_symlink()


def test_a_whole_file_is_written_or_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_whole(path, b"one")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["run.json"]
