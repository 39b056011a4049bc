"""Child processes with a limit of time, for scripts that must end in time themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

TIMED_OUT = 124
GRACE_S = 10
"""Between the request to end and the end: a benchmark ends its own children first."""


@dataclass(frozen=True)
class Done:
    """What a command left."""

    command: tuple[str, ...]
    code: int  # TIMED_OUT where it was ended
    stdout: str
    stderr: str
    seconds: float


def run_timed(command: Sequence[str], *, limit_s: float) -> Done:
    """Run a command in a session of its own; at the limit, or if we are interrupted, the whole session is ended."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            code = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            _end(child)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", errors="replace"))
    return Done(tuple(command), code, texts[0], texts[1], time.monotonic() - began)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
