"""The thread that learns: it updates unit after unit while the next step's forward chases it.

*No update before the norm*: a step is submitted when its norm is known and finite, with the clip factor.
*No fetch before update*: who wants to read a unit's weights waits for that unit only (`wait_updated`).
*No offload into an unread slab*: a unit's gradient slab may be refilled when the unit is updated.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatrain.host.gradient import UnitGradient
from megatrain.host.store import HostStore, HostUnit
from megatrain.optim.adamw import AdamW

UnitHook = Callable[[int], None]


@dataclass(frozen=True)
class _StepUpdate:
    step: int
    gradients: tuple[UnitGradient, ...]
    lr: float
    clip: float


class OptimizerFailed(RuntimeError):
    """The update of a unit raised; its cause is the exception of the worker. The unit may be half updated."""


def _nothing(unit: int) -> None:
    """The hook of who does not listen."""


class OptimizerWorker:
    """Owns the optimizer thread. Its errors come home: every later call raises OptimizerFailed *from* the first one."""

    def __init__(
        self,
        optimizer: AdamW,
        *,
        store: HostStore,
        synchronous: bool = False,  # update inside submit: for tests that note the order of accesses
        before_unit: UnitHook = _nothing,
        after_unit: UnitHook = _nothing,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._before_unit = before_unit
        self._after_unit = after_unit
        self._changed = threading.Condition()
        self._pending = [0] * len(store.units)  # submitted updates that are not done, by unit
        self._failure: OptimizerFailed | None = None
        self._inbox: queue.SimpleQueue[_StepUpdate | None] = queue.SimpleQueue()
        self.last_update_s = 0.0  # seconds spent updating in the last finished step, all waits excluded
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._serve, name="optimizer", daemon=True)
            self._thread.start()

    def submit(self, step: int, gradients: Sequence[UnitGradient], *, lr: float, clip: float) -> None:
        """Queue an update, unit by unit in the order given: that in which the next forward needs them.

        Units that are resident on the device are updated by the caller's thread, on the device. What that raises
        is a failure as on the worker's: nothing else of the step is updated then.
        """
        here = [gradient for gradient in gradients if gradient.resident is None]
        update = _StepUpdate(step, tuple(here), lr, clip)
        with self._changed:
            self._raise_failure()
        for gradient in gradients:  # enqueued where the next forward will be, so it needs no waiting
            if gradient.resident is not None:
                self._update_resident(gradient.resident, gradient, update=update)
        with self._changed:
            for gradient in update.gradients:
                self._pending[gradient.unit] += 1
        if self._thread is None:
            self._apply(update)
            self._raise_failure()
        else:
            self._inbox.put(update)

    def updated(self, unit: int) -> bool:
        """Whether every update submitted for `unit` is done."""
        with self._changed:
            self._raise_failure()
            return self._pending[unit] == 0

    def wait_updated(self, unit: int) -> None:
        """Block until every update submitted for `unit` is done (no fetch before update)."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._pending[unit] == 0)
            self._raise_failure()

    def drain(self) -> None:
        """Block until everything submitted is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not any(self._pending))
            self._raise_failure()

    def close(self) -> None:
        """Finish what was submitted and end the thread. Raises nothing: call `drain` first to hear of a failure."""
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    def _update_resident(self, host: HostUnit, gradient: UnitGradient, *, update: _StepUpdate) -> None:
        try:
            self._optimizer.update(host, lr=update.lr, clip=update.clip, touched=gradient.touched)
        except BaseException as error:  # the state is of two steps: whoever might save it must hear of it
            self._fail(error, step=update.step, unit=gradient.unit)
            self._raise_failure()

    def _serve(self) -> None:
        while (update := self._inbox.get()) is not None and self._failure is None:
            self._apply(update)

    def _apply(self, update: _StepUpdate) -> None:
        spent_s = 0.0
        for gradient in update.gradients:
            try:
                gradient.wait()
                self._before_unit(gradient.unit)
                begin = time.perf_counter()
                self._optimizer.update(
                    self._store.units[gradient.unit], lr=update.lr, clip=update.clip, touched=gradient.touched
                )
                self._after_unit(gradient.unit)
                spent_s += time.perf_counter() - begin
            except BaseException as error:  # the border of the thread: whoever waits must wake and hear of it
                self._fail(error, step=update.step, unit=gradient.unit)
                return
            with self._changed:
                self._pending[gradient.unit] -= 1
                self._changed.notify_all()
        self.last_update_s = spent_s

    def _fail(self, error: BaseException, *, step: int, unit: int) -> None:
        name = self._store.units[unit].unit.name
        failure = OptimizerFailed(f"the optimizer failed at step {step} on the {name}: {error}")
        failure.__cause__ = error
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise OptimizerFailed(str(self._failure)) from self._failure.__cause__
