"""metrics.jsonl: one line per event, cut back on resume, never the reason that a run is lost.

A full or absent disk does not stop training: lines wait in memory and are written as soon as it takes
them again. A line is either there as a whole or not at all, unless the process is killed inside a
write; `cut_back` removes such a stump.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.files import open_own, write_whole
from megatrain.report.events import Event, record


class MetricsLog:
    """An append-only file of JSON lines. `warn` is told once per trouble with the disk."""

    def __init__(self, path: Path, *, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._pending: list[bytes] = []
        self._in_trouble = False
        self._fd = open_own(path, os.O_RDWR | os.O_CREAT)
        self._end = os.fstat(self._fd).st_size

    def write(self, event: Event) -> None:
        self._pending.append(json.dumps(record(event), allow_nan=False).encode() + b"\n")
        self._flush()

    def sync(self) -> None:
        """Force what was written to the disk: called before a checkpoint that counts on these lines."""
        self._flush()
        self._bring_back()
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._trouble(error)

    def close(self) -> None:
        self._flush()
        if self._pending:
            self._warn(f"{len(self._pending)} lines of {self._path} could not be written")
        os.close(self._fd)

    def cut_back(self, *, step: int, eval_step: int | None) -> None:
        """Forget what came after the checkpoint: events of later steps, and evaluations that it does not know of."""
        data = self._path.read_bytes()
        kept = b"".join(line + b"\n" for line in data.split(b"\n") if _belongs(line, step=step, eval_step=eval_step))
        if kept != data:
            self._replace(kept)

    def _bring_back(self) -> None:
        """Where somebody removed the file: it is still open here, and is written again with all that it holds."""
        if os.path.lexists(self._path):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._replace(os.pread(self._fd, self._end, 0))
        except OSError as error:
            return self._trouble(error)
        self._warn(f"{self._path} was removed; its lines are written again, and it goes on")

    def _replace(self, data: bytes) -> None:
        write_whole(self._path, data)
        os.close(self._fd)
        self._fd = open_own(self._path, os.O_RDWR)
        self._end = len(data)

    def _flush(self) -> None:
        while self._pending:
            try:
                written = os.pwrite(self._fd, self._pending[0], self._end)
                if written < len(self._pending[0]):  # a disk that fills up takes part of a line: take it back
                    os.ftruncate(self._fd, self._end)
                    return self._trouble(OSError("no space left"))
            except OSError as error:
                return self._trouble(error)
            self._end += written
            self._pending.pop(0)
            self._in_trouble = False

    def _trouble(self, error: OSError) -> None:
        if not self._in_trouble:
            self._warn(f"cannot write {self._path} ({error.strerror or error}); its lines are kept in memory meanwhile")
        self._in_trouble = True


def _belongs(line: bytes, *, step: int, eval_step: int | None) -> bool:
    event = _event(line)
    if event is None:
        return False
    known = eval_step if event["kind"] == "eval" else step
    return known is not None and event["step"] <= known


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None for the stump of a killed write, and for the nothing after the last newline."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("step"), int) and "kind" in event
    return event if is_event else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a metrics.jsonl."""
    if not path.is_file():
        return []
    events = (_event(line) for line in path.read_bytes().split(b"\n"))
    return [event for event in events if event is not None]
