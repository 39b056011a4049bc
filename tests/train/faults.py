"""Disks that fail, in a process of one's own: `install` makes the calls that write a run's files raise or dawdle.

A fault is written "CALL:ERROR:FIRST:TIMES:PART": calls of os.CALL on files whose path has PART in it raise ERROR
(a name of errno), from the FIRST on, TIMES times ("inf": for ever). "CALL:0.02:1:inf:PART" sleeps instead.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROGRAM = """
import os, sys
sys.path.insert(0, os.environ["CHAOS_TESTS"])
import faults
faults.finetune()
"""
"""A process that reads CHAOS_FAULTS and its arguments."""


def finetune() -> None:
    """What a forked process or PROGRAM does: the command line on a disk that fails as CHAOS_FAULTS says."""
    for text in filter(None, os.environ.get("CHAOS_FAULTS", "").split(",")):
        Fault.parse(text).install()
    if os.environ.get("CHAOS_FAULTS"):
        from megatrain.train import checkpoint_writer

        checkpoint_writer.RETRY_WAITS_S = (0.2, 0.2, 0.5)
    from megatrain.cli.main import main

    main()


@dataclass
class Fault:
    call: str
    does: str  # a name of errno, or seconds
    first: int
    times: float
    part: str  # of the path
    seen: int = 0

    @classmethod
    def parse(cls, text: str) -> Fault:
        call, does, first, times, part = text.split(":", 4)
        return cls(call, does, int(first), float(times), part)

    def install(self) -> None:
        real: Callable[..., Any] = getattr(os, self.call)
        counting = threading.Lock()

        def wrapped(fd: int, *args: Any, **options: Any) -> Any:
            if self.part in os.readlink(f"/proc/self/fd/{fd}"):
                with counting:
                    self.seen += 1
                    hit = self.first <= self.seen < self.first + self.times
                if hit:
                    self._strike()
            return real(fd, *args, **options)

        setattr(os, self.call, wrapped)

    def _strike(self) -> None:
        number = getattr(errno, self.does, None)
        if number is None:
            time.sleep(float(self.does))
        else:
            raise OSError(number, os.strerror(number))
