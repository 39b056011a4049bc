"""Writing checkpoints: aside, forced to the disk, renamed; the old one stays until the new one is whole.

Units are written in the order of the update, and each may be updated again as soon as its bytes are taken
(train/gate.py). Nothing is copied for it: what is between memory and the disk is in the kernel's hands.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from megatrain.errors import DiskError
from megatrain.host.state_files import FileRecord, write_unit
from megatrain.host.store import HostStore, HostUnit
from megatrain.plan.disk import SPARE_BYTES
from megatrain.report.console import Console
from megatrain.report.events import SaveReport
from megatrain.report.text import clock
from megatrain.train import manifest as manifests
from megatrain.train.checkpoint import (
    file_name,
    given_up,
    make_room,
    newest_checkpoint,
    path_of,
    remove,
    state_bytes,
    step_of,
    steps,
)
from megatrain.train.gate import SnapshotGone, UnitGate
from megatrain.train.manifest import FileInfo, Identity, Manifest
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState
from megatrain.units import format_size

_ASIDE = re.compile(r"\.step-\d{6,}\.partial")
_FILES_AT_ONCE = 4  # one is being taken, the others are being forced to the disk
RETRY_WAITS_S = (2.0, 5.0, 10.0, 15.0, 30.0, 30.0, 30.0)
"""Pauses between the attempts to write a checkpoint that the disk does not take; about two minutes in all."""


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
        retry_waits_s: Sequence[float] | None = None,
        mend_folder: Callable[[], None] = lambda: None,
    ) -> None:
        """retry_waits_s: RETRY_WAITS_S unless given. mend_folder: called before each attempt, to write again what else
        belongs in the run's folder and was removed; raises OSError."""
        self._folder, self._store, self._identity, self._keep = folder, store, identity, keep
        self._console, self._stop = console, stop
        self._mend_folder = mend_folder
        self._retry_waits_s = RETRY_WAITS_S if retry_waits_s is None else retry_waits_s
        self._bytes_per_s: float | None = None  # of the last checkpoint, for the expected time of the next

    @property
    def units(self) -> range:
        return range(len(self._store.units))

    def save(self, state: TrainState, *, gate: UnitGate | None = None, patient: bool = False) -> SaveReport:
        """Write the checkpoint of `state`, which `gate` holds.

        A unit is released when it is taken; with `patient` none before all of them are on the disk. A disk that does
        not take it is tried again for a while, as long as the state can be had. Raises SnapshotGone when it cannot,
        DiskError when the disk did not recover; the previous checkpoint is intact.
        """
        gate = gate or UnitGate()
        self._tell_expected_time(state)
        waits, begin_s, first = iter(self._retry_waits_s), time.perf_counter(), ""
        while True:
            attempt_s = time.perf_counter()
            try:
                manifest = self._write(state, gate=gate, patient=patient)
                break
            except OSError as error:
                self._try_to_remove_partial()
                first = first or _reason(error)
                reason = first if _reason(error) == first else f"{_reason(error)}; at first: {first}"
                if not gate.hold_again():
                    raise SnapshotGone(reason) from error
                wait_s = next(waits, None)
                if wait_s is None or self._stop.requested:
                    raise self._failure(reason, state=state) from error
                self._console.warn(f"cannot write the checkpoint: {reason}; trying again in {wait_s:.0f} s")
                self._pause(wait_s)
            except SnapshotGone:
                self._try_to_remove_partial()
                raise
        gate.open()
        self._bytes_per_s = manifest.total_bytes / (time.perf_counter() - attempt_s)
        self._prune(state.step)
        return SaveReport(
            step=state.step,
            epoch=state.epochs,
            time=time.time(),
            path=str(path_of(self._folder, state.step)),
            bytes=manifest.total_bytes,
            save_s=time.perf_counter() - begin_s,
            stall_s=gate.stood_s,
            weights_sha256=manifest.weights_sha256,
        )

    def _write(self, state: TrainState, *, gate: UnitGate, patient: bool) -> Manifest:
        self._mend_folder()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_partial()
        self._make_room(state)
        target = path_of(self._folder, state.step)
        aside = self._folder / f".{target.name}.partial"
        aside.mkdir()
        records = self._write_units(aside, state=state, gate=gate, patient=patient)
        files = {name: FileInfo(record.bytes, record.checksum) for name, record in records.items()}
        digest = hashlib.sha256("".join(record.weights for record in records.values()).encode())
        manifest = Manifest(state, self._identity, files, digest.hexdigest())
        (aside / manifests.NAME).write_text(manifest.to_text())
        _force(aside / manifests.NAME)
        _force(aside)
        if os.path.lexists(target):  # a damaged one, or of a future that was given up
            remove(target)
        aside.rename(target)
        _force(self._folder)
        return manifest

    def _write_units(self, aside: Path, *, state: TrainState, gate: UnitGate, patient: bool) -> dict[str, FileRecord]:
        """While the files before are being forced to the disk, the next unit is taken already."""
        jobs: dict[str, Future[FileRecord]] = {}
        pool = ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="save")
        try:
            for unit in self._store.units:
                gate.wait_current(unit.unit.index)
                taken: SimpleQueue[bool] = SimpleQueue()
                jobs[file_name(unit)] = pool.submit(self._write_one, aside, unit, taken=taken, state=state)
                if not taken.get():
                    break
                if not patient:
                    gate.release(unit.unit.index)
            return {name: job.result() for name, job in jobs.items()}
        finally:
            pool.shutdown(cancel_futures=True)

    def _write_one(self, aside: Path, unit: HostUnit, *, taken: SimpleQueue[bool], state: TrainState) -> FileRecord:
        """In a thread of its own. The first word in `taken` says whether the unit was."""
        begin_s = time.perf_counter()
        try:
            record = write_unit(aside / file_name(unit), unit, taken=lambda: taken.put(True))
        finally:
            taken.put(False)
        if unit.unit.index == 0:
            self._learn_speed(record.bytes, time.perf_counter() - begin_s, state=state)
        return record

    # -- room on the disk ---------------------------------------------------------------------------------

    def _make_room(self, state: TrainState) -> None:
        """`keep` checkpoints and the new one need a place for one more; where there is none the oldest go first."""
        needed = state_bytes(self._store) + SPARE_BYTES
        free = make_room(
            self._folder,
            on=self._folder,
            needed=needed,
            what="one more checkpoint",
            step=state.step,
            warn=self._console.warn,
        )
        if free < needed:
            raise OSError(f"{format_size(needed)} are needed and {format_size(free)} are free in {self._folder}")

    def _prune(self, step: int) -> None:
        """Keep the newest complete ones up to `step`; what lies beyond it is of a future that was given up."""
        ours = [path for path in steps(self._folder) if step_of(path) <= step]
        kept = [path for path in ours if (path / manifests.NAME).exists()][: self._keep]
        for path in (*steps(self._folder), *given_up(self._folder)):
            if path in kept:
                continue
            try:
                remove(path)
            except OSError as error:  # the new one is safe all the same
                self._console.warn(f"cannot remove {path}: {_reason(error)}")

    def _remove_partial(self) -> None:
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                if not _ASIDE.fullmatch(path.name):
                    continue
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                else:
                    shutil.rmtree(path)

    def _try_to_remove_partial(self) -> None:
        """What cannot go now goes before the next attempt, or ends that with a reason."""
        with suppress(OSError):
            self._remove_partial()

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

    def _failure(self, reason: str, *, state: TrainState) -> DiskError:
        previous = newest_checkpoint(self._folder)
        kept = f"{previous.name} is intact" if previous is not None else "there is no earlier checkpoint"
        again = "go on with --resume auto" if previous is not None else "start again: nothing that was trained is on it"
        return DiskError(
            f"the checkpoint of step {state.step} cannot be written ({reason}); {kept}",
            hint=f"make room on the disk and {again}",
            where=str(self._folder),
        )

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self._stop.requested:
            time.sleep(min(0.1, seconds))


def _force(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
