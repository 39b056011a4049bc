"""What every input must come to: a result, or one of our errors, soon and in bounded memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fuzz.target import Target
from megatrain.errors import MegatrainError
from megatrain.train.manifest import Damaged

CPU_S = 60
"""A hang, not a slow machine: the longest input of the corpus takes a hundredth of it."""
EXTRA_BYTES = 6 << 30
LONGEST_MESSAGE = 12_000


class Hang(BaseException):
    """An input kept the processor for too long."""


class Wrong(AssertionError):
    """An error of ours that does not say what it should."""


def outcome(target: Target, data: bytes, *, folder: Path) -> str:
    """ "valid" or "refused". Raises what the program raised when that is no error of ours."""
    with bounded():
        try:
            target.read(data, folder)
        except Damaged as reason:
            _check_text(str(reason))
            return "refused"
        except MegatrainError as error:
            _check(error)
            return "refused"
    return "valid"


def _check(error: MegatrainError) -> None:
    if error.exit_code not in (2, 3):
        raise Wrong(f"exit code {error.exit_code}: {error}") from error
    _check_text(error.message)
    for part in (error.hint, error.where):
        if part is not None:
            _check_text(part)


def _check_text(text: str) -> None:
    if not text.strip():
        raise Wrong("an empty message")
    if len(text) > LONGEST_MESSAGE:
        raise Wrong(f"a message of {len(text)} characters: {text[:200]}")


@contextmanager
def bounded() -> Iterator[None]:
    """Limits on processor time and on memory beyond what the process has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGVTALRM, _hang)
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _hang(signum: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {CPU_S} s")
