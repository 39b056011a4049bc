"""Checkpoints on disk: written aside, forced to the disk, renamed; the old one stays until the new one is whole.

checkpoints/step-000123/manifest.json            state, identity, sizes and checksums; written last
                        0000-stem.safetensors    weights and optimizer state, one file per unit
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import DiskError
from megatrain.host.state_files import read_unit, write_unit
from megatrain.host.store import HostStore, HostUnit
from megatrain.report.console import Console
from megatrain.report.events import SaveReport
from megatrain.report.text import clock
from megatrain.train import manifest as manifests
from megatrain.train.manifest import Damaged, FileInfo, Identity, Manifest, read_manifest
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState
from megatrain.units import format_size

_NAME = re.compile(r"step-(\d{6,})")
_ASIDE = re.compile(r"\.step-\d{6,}\.partial")
_SPARE_BYTES = 4 << 20  # manifest, headers, directory entries
RETRY_WAITS_S = (2.0, 5.0, 10.0, 15.0, 30.0, 30.0, 30.0)
"""Pauses between the attempts to write a checkpoint that the disk does not take; about two minutes in all."""


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
    for path in _steps(folder):
        try:
            usable.append(Checkpoint.open(path))
        except Damaged as error:
            skipped.append(Skipped(path, str(error)))
    return Found(tuple(usable), tuple(skipped))


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, judged by its manifest's presence alone."""
    return next((path for path in _steps(folder) if (path / manifests.NAME).exists()), None)


def file_name(unit: HostUnit) -> str:
    return f"{unit.unit.index:04}-{unit.unit.name.replace(' ', '-')}.safetensors"


def state_bytes(store: HostStore) -> int:
    """Bytes of tensors in one checkpoint."""
    tensors = [t for u in store.units for t in (u.hi, u.lo, u.exp_avg, u.exp_avg_sq, u.steps)]
    return sum(t.numel() * t.element_size() for t in tensors)


class CheckpointWriter:
    """Writes the state of one run and keeps the newest `keep` checkpoints of it."""

    def __init__(
        self,
        folder: Path,
        *,
        store: HostStore,
        identity: Identity,
        keep: int,
        console: Console,
        stop: StopFlag,
        retry_waits_s: Sequence[float] = RETRY_WAITS_S,
    ) -> None:
        self._folder, self._store, self._identity, self._keep = folder, store, identity, keep
        self._console, self._stop, self._retry_waits_s = console, stop, retry_waits_s
        self._bytes_per_s: float | None = None  # of the last checkpoint, for the expected time of the next

    def save(self, state: TrainState) -> SaveReport:
        """Write the checkpoint of `state`; the optimizer must be at rest.

        A disk that does not take it is tried again for a while. Raises DiskError after that, with the previous
        checkpoint intact.
        """
        self._tell_expected_time(state)
        waits = iter(self._retry_waits_s)
        while True:
            begin_s = time.perf_counter()
            try:
                manifest = self._write(state)
                break
            except OSError as error:
                self._remove_partial()
                wait_s = next(waits, None)
                if wait_s is None or self._stop.requested:
                    raise self._failure(error, state=state) from error
                self._console.warn(f"cannot write the checkpoint: {_reason(error)}; trying again in {wait_s:.0f} s")
                self._pause(wait_s)
        save_s = time.perf_counter() - begin_s
        self._bytes_per_s = manifest.total_bytes / save_s
        self._prune(state.step)
        path = str(self._path(state.step))
        return SaveReport(state.step, state.epochs, time.time(), path, manifest.total_bytes, save_s)

    def _write(self, state: TrainState) -> Manifest:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_partial()
        self._check_space()
        aside = self._folder / f".{self._path(state.step).name}.partial"
        aside.mkdir()
        files = {}
        for unit in self._store.units:
            begin_s = time.perf_counter()
            written = write_unit(aside / file_name(unit), unit)
            files[file_name(unit)] = FileInfo(written.bytes, written.checksum)
            self._learn_speed(written.bytes, time.perf_counter() - begin_s, state=state)
        manifest = Manifest(state, self._identity, files)
        (aside / manifests.NAME).write_text(manifest.to_text())
        _force(aside / manifests.NAME)
        _force(aside)
        target = self._path(state.step)
        if target.exists():  # a damaged one, or of a future that was given up
            _remove(target)
        aside.rename(target)
        _force(self._folder)
        return manifest

    def _check_space(self) -> None:
        needed, free = state_bytes(self._store) + _SPARE_BYTES, shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(f"{format_size(needed)} are needed and {format_size(free)} are free in {self._folder}")

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06}"

    # -- what is told -------------------------------------------------------------------------------------

    def _tell_expected_time(self, state: TrainState) -> None:
        size = state_bytes(self._store)
        about = f", about {clock(size / self._bytes_per_s)}" if self._bytes_per_s else ""
        self._console.phase(f"writing the checkpoint of step {state.step}: {format_size(size)}{about}")

    def _learn_speed(self, nbytes: int, seconds: float, *, state: TrainState) -> None:
        """After the first file of the first checkpoint the rest can be told."""
        if self._bytes_per_s is None and nbytes > 16 << 20:
            self._bytes_per_s = nbytes / seconds
            self._tell_expected_time(state)

    def _failure(self, error: OSError, *, state: TrainState) -> DiskError:
        previous = newest_checkpoint(self._folder)
        kept = f"{previous.name} is intact" if previous is not None else "there is no earlier checkpoint"
        return DiskError(
            f"the checkpoint of step {state.step} cannot be written ({_reason(error)}); {kept}",
            hint="make room on the disk and go on with --resume auto",
            where=str(self._folder),
        )

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self._stop.requested:
            time.sleep(min(0.1, seconds))

    # -- housekeeping -------------------------------------------------------------------------------------

    def _prune(self, step: int) -> None:
        """Keep the newest complete ones up to `step`; what lies beyond it is of a future that was given up."""
        ours = [path for path in _steps(self._folder) if _step_of(path) <= step]
        kept = [path for path in ours if (path / manifests.NAME).exists()][: self._keep]
        for path in _steps(self._folder):
            if path not in kept:
                _remove(path)

    def _remove_partial(self) -> None:
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if _ASIDE.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _steps(folder: Path) -> list[Path]:
    """Folders named like checkpoints, newest first."""
    if not folder.is_dir():
        return []
    named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=_step_of, reverse=True)


def _remove(path: Path) -> None:
    """Without its manifest it is no checkpoint any more, whatever happens in between."""
    (path / manifests.NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _force(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
