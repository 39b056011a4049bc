"""What stands between the optimizer and the saver, so that a checkpoint is of one step while training goes on.

*No update before the snapshot has the unit*: while a checkpoint of step n is written, a unit is updated for step
n + 1 only when its bytes of step n have been taken.
*No snapshot before the update*: a unit is taken when its updates of the steps up to n are done.

Both go through the units in the same order, so the one that is behind sets the pace and neither is held up by a
unit that it does not need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class SnapshotGone(Exception):
    """The state that was to be saved can no longer be had: updates of it were changed or will never come."""


class SaverFailed(RuntimeError):
    """The saver's thread raised; its cause is that exception."""


class UnitGate:
    """Passed by the optimizer's thread around each update (`before`, `after`); held and released by the saver."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._submitted: dict[int, int] = {}  # updates by unit, of this process
        self._done: dict[int, int] = {}
        self._snapshot: dict[int, int] = {}  # done updates of each unit in the state that is being saved
        self._held: frozenset[int] | set[int] = frozenset()
        self._units: frozenset[int] = frozenset()
        self._passed = False  # a unit of the snapshot was updated since
        self._no_more = False
        self._failure: BaseException | None = None
        self._standing = 0  # threads that wait for the saver
        self._stood_s = 0.0
        self._since_s = 0.0

    # -- the trainer --------------------------------------------------------------------------------------

    def submit(self, units: Iterable[int]) -> None:
        """The updates that the optimizer is about to be given."""
        with self._changed:
            for unit in units:
                self._submitted[unit] = self._submitted.get(unit, 0) + 1

    def hold(self, units: Iterable[int]) -> None:
        """A snapshot begins: the state with everything that was submitted so far, and nothing later."""
        with self._changed:
            self._snapshot = dict(self._submitted)
            self._units = frozenset(units)
            self._held = set(self._units)
            self._passed = False
            self._stood_s = 0.0

    def no_more_updates(self) -> None:
        """The optimizer has ended: who waits for an update of it waits in vain."""
        with self._changed:
            self._no_more = True
            self._changed.notify_all()

    def more_updates(self) -> None:
        """Training goes on after `no_more_updates`."""
        with self._changed:
            self._no_more = False

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Time in here counts as time that training stood still for the saver, once however many wait."""
        with self._changed:
            self._begin_standing()
        try:
            yield
        finally:
            with self._changed:
                self._end_standing()

    @property
    def stood_s(self) -> float:
        """Seconds that the optimizer or the trainer waited for the saver since `hold`."""
        with self._changed:
            return self._stood_s + (time.perf_counter() - self._since_s if self._standing else 0.0)

    # -- the optimizer's thread ---------------------------------------------------------------------------

    def before(self, unit: int) -> None:
        """Wait until `unit` may be updated. Raises SaverFailed when it never may."""
        with self._changed:
            if unit in self._held and self._in_snapshot(unit):
                self._begin_standing()
                self._changed.wait_for(lambda: self._failure is not None or unit not in self._held)
                self._end_standing()
            if self._failure is not None:
                raise SaverFailed("the checkpoint could not be written") from self._failure
            if unit in self._units and self._in_snapshot(unit):
                self._passed = True

    def after(self, unit: int) -> None:
        """`unit` is updated."""
        with self._changed:
            self._done[unit] = self._done.get(unit, 0) + 1
            self._changed.notify_all()

    # -- the saver's thread -------------------------------------------------------------------------------

    def wait_current(self, unit: int) -> None:
        """Wait for the updates that belong to the snapshot. Raises SnapshotGone when they will not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._no_more or self._in_snapshot(unit))
            if not self._in_snapshot(unit):
                raise SnapshotGone("the optimizer ended before its update was done")

    def release(self, unit: int) -> None:
        """The bytes of `unit` are taken."""
        with self._changed:
            self._held = self._held - {unit}
            self._changed.notify_all()

    def hold_again(self) -> bool:
        """Hold every unit once more, to take the snapshot again. False, and nothing held, if one was updated since."""
        with self._changed:
            self._held = frozenset() if self._passed else self._units
            self._changed.notify_all()
            return not self._passed

    def open(self) -> None:
        """The snapshot is on the disk, or given up."""
        with self._changed:
            self._held = self._units = frozenset()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No checkpoint can be written: no update goes through any more."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # -- under the lock -----------------------------------------------------------------------------------

    def _in_snapshot(self, unit: int) -> bool:
        """Whether what `unit` holds now is at least what the snapshot holds of it."""
        return self._done.get(unit, 0) >= self._snapshot.get(unit, 0)

    def _begin_standing(self) -> None:
        if not self._standing:
            self._since_s = time.perf_counter()
        self._standing += 1

    def _end_standing(self) -> None:
        self._standing -= 1
        if not self._standing:
            self._stood_s += time.perf_counter() - self._since_s
