"""Interrupts: the first one asks, the second one ends.

While nothing would be lost (reading data, loading weights, planning, exporting) the first SIGINT, SIGTERM or
SIGHUP raises `Interrupted` at once. Inside `StopFlag.held` (training) it only raises the flag, which the
trainer looks at between steps and the executor, through `PolledUpdates`, between layers once the step has had
its time. Python runs signal handlers between bytecodes of the main thread only, so a watcher thread, woken
through the signal wakeup descriptor, ends the process when the main thread is stuck in native code.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # the guard stands before torch is imported
    from megatrain.stream.ring import Updates

STEP_GRACE_S = 10.0
"""A step that runs this long after the interrupt is given up between two layers; its data is not used up."""
RAISE_GRACE_S = 7.0
"""Where nothing is to be saved, an interrupt has so long to raise, and so long again to get to its handler: a
library may swallow it. After that the process is ended."""
_WAITS = f"the running step comes to its end, or is given up after {STEP_GRACE_S:.0f} s, and a checkpoint is written"
_AGAIN = signal.SIGURG  # from our watcher to the main thread; by default nobody hears it


class Interrupted(BaseException):
    """The person or the machine wants the process to stop. Like KeyboardInterrupt, no `except Exception` holds it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class StopFlag:
    """Whether, and since when, the run is asked to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._since_s = 0.0  # of the request
        self._progress_s = 0.0  # of the last end of `held`, or raise
        self._held = 0
        self._handled = False
        self._failure: Exception | None = None
        self.kept: str | None = None  # for people: the newest complete checkpoint
        self.announce: Callable[[str], None] | None = None  # says at once that a request has to wait
        self.swallowed = False  # it was raised where Python drops exceptions: in a destructor or a callback

    @property
    def requested(self) -> bool:
        return self.signum is not None

    @property
    def raises(self) -> bool:
        """An interrupt now raises instead of waiting to be asked."""
        return self._held == 0 and not self._handled

    @property
    def stuck(self) -> bool:
        """It should have raised and been handled long ago, but the main thread does not get to it."""
        since_s = max(self._since_s, self._progress_s)
        return self.requested and self.raises and time.monotonic() - since_s > RAISE_GRACE_S

    def request(self, signum: int) -> None:
        if self.signum is None:
            self.signum, self._since_s = signum, time.monotonic()

    def tell(self) -> None:
        """Say what a request waits for. From a thread of its own: who hears it may be stuck."""
        if self.announce is not None and not self.raises:
            words = f"{_WAITS}; a second signal ends at once, and {_kept(self.kept)}"
            threading.Thread(target=self.announce, args=(words,), daemon=True).start()

    def check(self) -> None:
        """Raise Interrupted if it was asked for. For loops in which nothing is lost."""
        if self.signum is not None:
            self._progress_s = time.monotonic()
            raise Interrupted(self.signum)

    def handled(self) -> None:
        """Interrupted has arrived where the run is brought to its end; nothing raises or is hurried from here on."""
        self._handled = True

    def fail(self, error: Exception) -> None:
        """From another thread: what the run cannot go on without is gone. Raised between two layers."""
        self._failure = error

    def check_overdue(self) -> None:
        """Raise Interrupted if it was asked for so long ago that the running step shall not be finished."""
        if self._failure is not None:
            raise self._failure
        if self.signum is not None and time.monotonic() - self._since_s > STEP_GRACE_S:
            self.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, an interrupt only raises the flag."""
        self._held += 1
        try:
            yield
        finally:
            self._progress_s = time.monotonic()
            self._held -= 1


class PolledUpdates:
    """The optimizer as the executor sees it, and a look at the flag at every layer."""

    def __init__(self, updates: Updates, *, stop: StopFlag) -> None:
        self._updates = updates
        self._stop = stop

    def updated(self, unit: int) -> bool:
        self._stop.check_overdue()
        return self._updates.updated(unit)

    def wait_updated(self, unit: int) -> None:
        self._stop.check_overdue()
        self._updates.wait_updated(unit)


class SignalGuard:
    """Owns the process's handlers while a run is going on. Enter it in the main thread."""

    def __init__(self) -> None:
        self.stop = StopFlag()
        self._previous: dict[int, Any] = {}
        self._previous_again: Any = None
        self._previous_hook = sys.unraisablehook
        self._read_fd = self._write_fd = -1
        self._previous_wakeup = -1
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup: the terminal may go away
            self._previous[signum] = signal.signal(signum, self._handle)
        self._previous_again = signal.signal(_AGAIN, self._raise_again)
        self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._note_swallowed
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        sys.unraisablehook = self._previous_hook
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._write_fd)  # the watcher reads the end of the pipe
        assert self._watcher is not None
        self._watcher.join()
        signal.signal(_AGAIN, self._previous_again)
        os.close(self._read_fd)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.stop.request(signum)
        if self.stop.raises:
            self.stop.check()

    def _raise_again(self, signum: int, frame: FrameType | None) -> None:
        if self.stop.raises:
            self.stop.check()

    def _note_swallowed(self, dropped: sys.UnraisableHookArgs) -> None:
        """The interrupt came in a destructor, which it cannot end: it is raised once more."""
        if isinstance(dropped.exc_value, Interrupted):
            self.stop.swallowed = True
        else:
            self._previous_hook(dropped)

    def _watch(self) -> None:
        """Count the signals as the kernel delivers them, whatever the main thread is doing."""
        seen = 0
        while True:
            ready, _, _ = select.select([self._read_fd], [], [], 1.0 if seen else None)
            if not ready:
                if self.stop.swallowed:
                    self.stop.swallowed = False
                    signal.pthread_kill(threading.main_thread().ident or 0, _AGAIN)
                elif self.stop.stuck:
                    _end_now(self.stop.signum or signal.SIGINT, "interrupted")
                continue
            delivered = os.read(self._read_fd, 64)
            if not delivered:
                return
            for signum in (s for s in delivered if s in self._previous):
                seen += 1
                if seen > 1:
                    _end_now(signum, f"stopped at the second signal; {_kept(self.stop.kept)}")
                self.stop.request(signum)  # the handler may never get its turn
                self.stop.tell()


def _kept(checkpoint: str | None) -> str:
    return "nothing is saved" if checkpoint is None else f"what came after {checkpoint} is lost"


def _end_now(signum: int, message: str) -> None:
    """Leave without unwinding. The lock goes with the process; a half-written checkpoint has no manifest."""
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    os.write(2, f"{cursor}\n{message}\n".encode())
    os._exit(128 + signum)
