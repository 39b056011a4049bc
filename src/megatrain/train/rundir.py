"""The folder of a run: who may write in it, and what lies where.

recipe.yaml  metrics.jsonl  checkpoints/  model/  run.json  crash.txt  lock
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatrain.errors import DiskError, MegatrainError, UsageError
from megatrain.files import is_mount, open_own, read_own, refuse_link, write_whole
from megatrain.recipe import Recipe, load_recipe
from megatrain.train.checkpoint import given_up, remove, steps

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class RunDir:
    """The paths of a run folder, and what is written whole: recipe and summary."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.summary = path / "run.json"
        self.crash = path / "crash.txt"
        self.lock = path / "lock"
        self.wandb_id = path / "wandb-id"

    def holds_run(self) -> bool:
        """Whether something was trained here. A run that failed before its first step left nothing to lose."""
        has_lines = self.metrics.is_file() and self.metrics.stat().st_size > 0
        has_checkpoint = self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*"))
        return has_lines or has_checkpoint or self.model.exists() or self.read_summary().get("status") == "done"

    def read_summary(self) -> dict[str, Any]:
        """run.json, or an empty object when there is none that can be read."""
        try:
            summary = json.loads(read_own(self.summary))
        except (OSError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def read_recipe(self) -> Recipe | None:
        """recipe.yaml, of the last process that trained here; None when there is none that can be read."""
        try:
            return load_recipe(str(self.recipe)) if self.recipe.is_file() else None
        except MegatrainError:
            return None

    def exported_dtype(self) -> str | None:
        """As output.export_dtype names what model/ states; None when it says nothing."""
        try:
            config = json.loads(read_own(self.model / "config.json"))
            stated = config.get("dtype", config.get("torch_dtype"))
        except (OSError, ValueError, RecursionError, AttributeError):
            return None
        return _DTYPES.get(stated) if isinstance(stated, str) else None

    def clear(self) -> None:
        """Remove the run that is here, and nothing that is not ours."""
        for path in (*steps(self.checkpoints), *given_up(self.checkpoints)):  # the folder may be a link or a mount
            remove(path)
        if self.checkpoints.is_dir() and not is_mount(self.checkpoints) and not self.checkpoints.is_symlink():
            shutil.rmtree(self.checkpoints)
        for folder in (self.model, self.path / "tensorboard"):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
        for file in (self.recipe, self.metrics, self.summary, self.crash, self.wandb_id):
            file.unlink(missing_ok=True)

    def write_recipe(self, text: str) -> None:
        write_whole(self.recipe, text.encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_whole(self.summary, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and be the only process that writes in it.

        Raises UsageError when another one does, DiskError when the folder cannot be written.
        """
        with self._refusals():
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            fd = self._take_lock()
        try:
            yield
        finally:
            self.lock.unlink(missing_ok=True)
            os.close(fd)

    def check_unlocked(self) -> None:
        """What `locked` would say of the folder and of another process, without writing anything."""
        with self._refusals():
            nearest = next(path for path in (self.path, *self.path.absolute().parents) if os.path.lexists(path))
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(nearest))
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))
            if os.statvfs(nearest).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(nearest))
            self._refuse_links()
            self._check_lock()

    def _refuse_links(self) -> None:
        """Files that are written where they lie, and those that are read or appear when nobody looks; others are
        replaced, and a link with them."""
        for path in (self.lock, self.metrics, self.crash, self.wandb_id):
            refuse_link(path)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{error.filename} is not a folder", where="output.dir") from None
        except OSError as error:
            raise DiskError(
                f"cannot write to {self.path}: {error.strerror}",
                hint="choose another folder with output.dir or --output-dir",
                where="output.dir",
            ) from error

    def _check_lock(self) -> None:
        if not self.lock.exists():
            return
        fd = open_own(self.lock, os.O_RDWR)
        try:
            self._flock(fd)
        finally:
            os.close(fd)

    def _take_lock(self) -> int:
        while True:
            fd = open_own(self.lock, os.O_RDWR | os.O_CREAT)
            try:
                self._flock(fd)
                if self.lock.exists() and os.path.samestat(os.fstat(fd), self.lock.stat()):
                    os.ftruncate(fd, 0)
                    os.write(fd, f"{socket.gethostname()} process {os.getpid()}\n".encode())
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # its last owner removed the file between our open and our lock: once more

    def _flock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"{self.path} is in use by {owner}",
                hint="wait until it ends, or choose another folder with --output-dir",
                where="output.dir",
            ) from None
