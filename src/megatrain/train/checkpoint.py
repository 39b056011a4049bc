"""Checkpoints on disk: what is one, which are there, and reading one into place.

checkpoints/step-000123/manifest.json            state, identity, sizes and checksums; written last
                        0000-stem.safetensors    weights and optimizer state, one file per unit
            given-up-000200/                     of a future that a resume from an older one gave up; goes with the
                                                 next checkpoint
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.host.state_files import read_unit
from megatrain.host.store import HostStore, HostUnit
from megatrain.report.console import Console
from megatrain.train import manifest as manifests
from megatrain.train.manifest import Damaged, FileInfo, Manifest, read_manifest
from megatrain.train.state import TrainState

_NAME = re.compile(r"step-(\d{6,})")
_GIVEN_UP = "given-up-{}"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: all files are there in the right size. Their checksums are compared as they are read."""

    path: Path
    manifest: Manifest

    @property
    def state(self) -> TrainState:
        return self.manifest.state

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Raises Damaged."""
        return cls(path, read_manifest(path))

    def load_into(self, store: HostStore, *, console: Console, check: Callable[[], None]) -> None:
        """Read weights and optimizer state straight into place. `check` is called between files and may raise.

        Raises Damaged; the store then holds a mixture and must be filled from somewhere else.
        """
        files, total, done = self.manifest.files, self.manifest.total_bytes, 0
        if set(files) != {file_name(unit) for unit in store.units}:
            raise Damaged("its files are not the units of this model")
        for unit in store.units:
            check()
            name = file_name(unit)
            try:
                read = read_unit(self.path / name, unit)
            except (OSError, ValueError) as error:
                raise Damaged(f"{name} cannot be read ({error})") from error
            if FileInfo(read.bytes, read.checksum) != files[name]:
                raise Damaged(f"{name} does not match its checksum")
            done += files[name].bytes
            console.progress("reading the checkpoint", done=done, total=total)


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    """What a checkpoints folder holds, newest first."""

    usable: tuple[Checkpoint, ...]
    skipped: tuple[Skipped, ...]


def find_checkpoints(folder: Path) -> Found:
    """Look through a checkpoints folder, which need not exist."""
    usable, skipped = [], []
    for path in steps(folder):
        try:
            usable.append(Checkpoint.open(path))
        except Damaged as error:
            skipped.append(Skipped(path, str(error)))
    return Found(tuple(usable), tuple(skipped))


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, judged by its manifest's presence alone."""
    return next((path for path in steps(folder) if (path / manifests.NAME).exists()), None)


def weights_digest(path: Path) -> str | None:
    """What the manifest of a checkpoint says of its master weights; None when it says nothing."""
    try:
        return read_manifest(path).weights_sha256
    except Damaged:
        return None


def file_name(unit: HostUnit) -> str:
    return f"{unit.unit.index:04}-{unit.unit.name.replace(' ', '-')}.safetensors"


def state_bytes(store: HostStore) -> int:
    """Bytes of tensors in one checkpoint."""
    tensors = [t for u in store.units for t in (u.hi, u.lo, u.exp_avg, u.exp_avg_sq, u.steps)]
    return sum(t.numel() * t.element_size() for t in tensors)


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}"


def steps(folder: Path) -> list[Path]:
    """Folders named like checkpoints, newest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of, reverse=True)


def remove(path: Path) -> None:
    """Without its manifest it is no checkpoint any more, whatever happens in between. Of a link only the link goes."""
    if path.is_symlink():
        path.unlink()
        return
    (path / manifests.NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def droppable(folder: Path, *, step: int) -> list[Path]:
    """What may go when the disk is short, the oldest first: the newest usable checkpoint up to `step` stays."""
    usable = [found.path for found in find_checkpoints(folder).usable if found.state.step <= step]
    if not usable:
        return []
    ours = [path for path in reversed(steps(folder)) if step_of(path) <= step and path != usable[0]]
    return ours + given_up(folder)


def make_room(folder: Path, *, on: Path, needed: int, what: str, step: int, warn: Callable[[str], None]) -> int:
    """Bytes free where `on` is, after checkpoints up to `step` made room where there was none: the oldest first, and
    the newest usable one always stays. what: what is to be written, for people."""
    free = shutil.disk_usage(on).free
    if free >= needed or not folder.is_dir() or os.stat(folder).st_dev != os.stat(on).st_dev:
        return free
    for path in droppable(folder, step=step):
        warn(f"the disk has no room for {what}; {path.name} goes before its time")
        remove(path)
        free = shutil.disk_usage(on).free
        if free >= needed:
            break
    return free


def give_up_after(folder: Path, *, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, newest first, so that nothing but their new names leads to them.

    Whoever resumes an older checkpoint by name goes on from there, and so does `--resume auto` after a kill.
    """
    renamed = []
    for path in steps(folder):
        if step_of(path) > step:
            target = path.with_name(_GIVEN_UP.format(path.name.removeprefix("step-")))
            if os.path.lexists(target):
                remove(target)
            renamed.append(path.rename(target))
    return renamed


def given_up(folder: Path) -> list[Path]:
    return sorted(folder.glob(_GIVEN_UP.format("*"))) if folder.is_dir() else []
