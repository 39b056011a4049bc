"""The thread that writes checkpoints while training goes on."""

from __future__ import annotations

import dataclasses
import queue
import threading
from dataclasses import dataclass

from megatrain.errors import MegatrainError
from megatrain.report.events import SaveReport
from megatrain.train.checkpoint_writer import CheckpointWriter
from megatrain.train.gate import SaverFailed, SnapshotGone, UnitGate
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState


@dataclass(frozen=True)
class Lost:
    """A checkpoint that was begun and cannot be completed: the disk failed when its state had moved on."""

    step: int
    reason: str


@dataclass(frozen=True)
class _Job:
    state: TrainState
    patient: bool


class Saver:
    """Owns the thread. What it raises comes home: to the optimizer at the gate, to the executor between two layers
    through the flag, and to whoever asks here."""

    def __init__(self, writer: CheckpointWriter, *, gate: UnitGate, stop: StopFlag) -> None:
        self._writer, self._gate, self._stop = writer, gate, stop
        self._changed = threading.Condition()
        self._busy = False
        self._outcome: SaveReport | Lost | None = None
        self._failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="saver", daemon=True)
        self._thread.start()

    def begin(self, state: TrainState, *, patient: bool = False) -> None:
        """Hold the state with every update that was submitted so far, and write it. The one before must be heard of.

        `patient`: no update goes through before all of it is on the disk.
        """
        if self._busy or self._outcome is not None:
            raise RuntimeError(f"step {state.step} cannot be saved: the checkpoint before it was not waited for")
        self._raise_failure()
        self._gate.hold(self._writer.units)
        self._busy = True
        self._inbox.put(_Job(state, patient))

    def poll(self) -> SaveReport | Lost | None:
        """What became of the checkpoint that was begun, once; None while it is being written or there is none.

        Raises what the saver raised.
        """
        with self._changed:
            self._raise_failure()
            outcome, self._outcome = self._outcome, None
            return outcome

    def wait(self) -> SaveReport | Lost | None:
        """The same, at its end. The wait counts as time that training stood still."""
        if self._busy:
            with self._gate.standing(), self._changed:
                self._changed.wait_for(lambda: not self._busy)
        outcome = self.poll()
        if isinstance(outcome, SaveReport):
            return dataclasses.replace(outcome, stall_s=self._gate.stood_s)
        return outcome

    def close(self) -> None:
        """Complete what is being written and end the thread. Raises nothing."""
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._inbox.get()) is not None and self._failure is None:
            self._save(job)

    def _save(self, job: _Job) -> None:
        outcome: SaveReport | Lost | None = None
        failure: BaseException | None = None
        try:
            outcome = self._writer.save(job.state, gate=self._gate, patient=job.patient)
        except SnapshotGone as error:
            self._gate.open()
            outcome = Lost(job.state.step, str(error))
        except BaseException as error:  # the border of the thread: whoever waits must wake and hear of it
            failure = error
            self._gate.fail(error)
            self._stop.fail(self._told(error))
        with self._changed:
            self._outcome, self._failure, self._busy = outcome, failure, False
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._told(self._failure)

    @staticmethod
    def _told(error: BaseException) -> Exception:
        if isinstance(error, MegatrainError):
            return error
        failed = SaverFailed(f"writing a checkpoint failed: {error}")
        failed.__cause__ = error
        return failed
