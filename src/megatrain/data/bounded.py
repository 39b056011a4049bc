"""A limit on processor time and memory around code that somebody else wrote: a chat template is a program.

Jinja's sandbox keeps a template away from files and processes, but not from loops within loops, macros that call
themselves twice, or ``'a' * 10**10``. What a template prints for one row takes milliseconds, so the limits are far
away from any that means well.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CPU_S = 30.0
EXTRA_BYTES = 4 << 30


class Exhausted(BaseException):
    """A limit was reached; the text says which. No ``except Exception`` on the way holds it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raises Exhausted in the block after CPU_S of the process's time, or when it asks for EXTRA_BYTES of memory.

    Time is limited in the main thread only, where Python runs signal handlers. A limit that the process has
    already is kept.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = _address_space_bytes() + EXTRA_BYTES
    lowered = soft == resource.RLIM_INFINITY or ceiling < soft
    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, _out_of_time) if timed else None
    try:
        if lowered:
            resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        yield
    except MemoryError:
        raise Exhausted(f"asked for more than {EXTRA_BYTES >> 20} MiB of memory") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
        if lowered:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _out_of_time(signum: int, frame: FrameType | None) -> None:
    raise Exhausted(f"ran for more than {CPU_S:g} s")


def _address_space_bytes() -> int:
    fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(fd, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(fd)
