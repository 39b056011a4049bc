"""What stands in the way of checkpoints or model is refused before a weight is read, by a dry run too."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whole import session, train, whole_recipe, write_rows

from megatrain.errors import DiskError, UsageError
from megatrain.files import is_mount
from megatrain.recipe import Recipe
from megatrain.train import build
from megatrain.train.checkpoint import find_checkpoints

MIB = 1 << 20
Mount = Callable[..., None]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts on a folder, with mount's own arguments."""
    mounted: list[Path] = []

    def on(folder: Path, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["mount", *arguments, str(folder)], check=False, capture_output=True).returncode:
            pytest.skip("no right to mount")
        mounted.append(folder)

    yield on
    for folder in reversed(mounted):
        subprocess.run(["umount", str(folder)], check=True)


def replacing(folder: Path, *, rows: Path) -> Recipe:
    return whole_recipe(folder, rows=rows, output={"dir": str(folder), "overwrite": True})


def assert_refused(
    recipe: Recipe, *, words: str, monkeypatch: pytest.MonkeyPatch, error: type[UsageError | DiskError] = UsageError
) -> None:
    def never(*args: object, **options: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(build, "load_pretrained", never)
    for attempt in (session(recipe).dry_run, session(recipe).run):
        with pytest.raises(error, match=words) as caught:
            attempt()
        assert caught.value.hint
    monkeypatch.undo()


def foreign(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "precious").write_text("keep")
    return folder


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("checkpoints", lambda path, aside: path.symlink_to("absent"), r"checkpoints: is a link to absent, which is"),
        ("checkpoints", lambda path, aside: path.touch(), "checkpoints: is a file"),
        ("model", lambda path, aside: path.symlink_to("absent"), "model: is a link to absent, which is not there"),
        ("model", lambda path, aside: path.touch(), "model: is a file"),
        ("model", lambda path, aside: path.symlink_to(foreign(aside)), "something else than a model"),
        ("model", lambda path, aside: foreign(path), "something else than a model"),
        (".model.partial", lambda path, aside: path.touch(), r"\.model\.partial: is a file"),
        (".model.old", lambda path, aside: path.touch(), r"\.model\.old: is a file"),
        ("run.json.partial", lambda path, aside: path.mkdir(), r"run\.json\.partial: is a folder"),
        ("recipe.yaml.partial", lambda path, aside: path.mkdir(), r"recipe\.yaml\.partial: is a folder"),
        ("metrics.jsonl.partial", lambda path, aside: path.mkdir(), r"metrics\.jsonl\.partial: is a folder"),
    ],
)
def test_what_is_in_the_way_is_refused_first(
    tmp_path: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[Path, Path], None],
    words: str,
) -> None:
    folder, aside = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    make(folder / name, aside)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert_refused(replacing(folder, rows=rows), words=words, monkeypatch=monkeypatch)
    assert sorted(path.name for path in tmp_path.rglob("*") if path != folder / "run.json") == before


def test_without_an_export_nothing_of_the_model_is_in_the_way(tmp_path: Path, rows: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model").symlink_to("absent")
    output = {"dir": str(folder), "export": False, "overwrite": True}
    session(whole_recipe(folder, rows=rows, output=output)).dry_run()


def test_a_mounted_folder_in_the_place_of_the_model(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount
) -> None:
    """Another disk, or another folder of this one under a name with a space in it."""
    for kind, folder in (("tmpfs", tmp_path / "run"), ("bind", tmp_path / "my run")):
        foreign_disk = tmp_path / "volume"
        foreign_disk.mkdir(exist_ok=True)
        assert not is_mount(folder / "model")
        mount(folder / "model", *(("-t", "tmpfs", "tmpfs") if kind == "tmpfs" else ("--bind", str(foreign_disk))))
        assert is_mount(folder / "model")
        assert_refused(replacing(folder, rows=rows), words="something is mounted there", monkeypatch=monkeypatch)


def test_checkpoints_on_a_disk_of_their_own_are_measured_there(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount
) -> None:
    """15 MiB hold no checkpoint of 12 and what lies beside it; 20 hold one, and no model of 2 beside it and 4 more."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount(tmp_path / "small", "-t", "tmpfs", "-o", "size=15m", "tmpfs")
    (folder / "checkpoints").symlink_to(tmp_path / "small")
    recipe = whole_recipe(folder, rows=rows)
    assert_refused(recipe, words="small: 16.0 MiB of disk are needed", monkeypatch=monkeypatch, error=DiskError)
    (folder / "checkpoints").unlink()
    mount(tmp_path / "enough", "-t", "tmpfs", "-o", "size=17m", "tmpfs")
    (folder / "checkpoints").symlink_to(tmp_path / "enough")
    assert train(recipe).status == "done"
    assert len(find_checkpoints(tmp_path / "enough").usable) == 1


def test_a_disk_for_the_model_alone(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount) -> None:
    mount(tmp_path / "run", "-t", "tmpfs", "-o", "size=5m", "tmpfs")
    (tmp_path / "many").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "many")
    recipe = whole_recipe(tmp_path / "run", rows=rows)
    words = "6.0 MiB of disk are needed and .* are free: the exported model 2"
    assert_refused(recipe, words=words, monkeypatch=monkeypatch, error=DiskError)
    subprocess.run(["mount", "-o", "remount,size=7m", str(tmp_path / "run")], check=True)
    assert train(recipe).status == "done"


def test_a_disk_for_checkpoints_that_may_not_be_written(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, mount: Mount
) -> None:
    mount(tmp_path / "run" / "checkpoints", "-t", "tmpfs", "-o", "ro", "tmpfs")
    recipe = whole_recipe(tmp_path / "run", rows=rows)
    assert_refused(recipe, words="Read-only file system", monkeypatch=monkeypatch, error=DiskError)


def test_a_run_whose_checkpoints_are_mounted_is_replaced(tmp_path: Path, rows: Path, mount: Mount) -> None:
    mount(tmp_path / "run" / "checkpoints", "-t", "tmpfs", "tmpfs")
    (tmp_path / "run" / "checkpoints" / "lost+found").mkdir()
    train(whole_recipe(tmp_path / "run", rows=rows, train={"steps": 2, "epochs": None}))
    recipe = replacing(tmp_path / "run", rows=rows)
    train(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1, "epochs": None})}))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["lost+found", "step-000001"]
