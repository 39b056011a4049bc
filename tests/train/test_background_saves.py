"""Checkpoints written while training goes on: they are of one step, and nothing that fails in them is lost or hangs."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import RecordingConsole, Stage, bits, stage, tiny_store

from megatrain.errors import DiskError, DoesNotFit
from megatrain.optim.worker import OptimizerFailed
from megatrain.train import checkpoint_writer
from megatrain.train.checkpoint import find_checkpoints
from megatrain.train.failure import machine_error
from megatrain.train.gate import SaverFailed
from megatrain.train.signals import Interrupted

UNITS = 4


def stopped_after(step: int, folder: Path, **settings: Any) -> Stage:
    """The same run, interrupted after `step`: its checkpoint was written with nothing else going on."""
    run = stage(folder, **settings)
    run.executor.on_step = lambda call: run.stop.request(signal.SIGTERM) if call == step else None
    with pytest.raises(Interrupted):
        run.train()
    return run


def files(run: Stage, step: int) -> dict[str, bytes]:
    folder = run.folder / "checkpoints" / f"step-{step:06}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def steps(run: Stage) -> list[int]:
    return sorted(found.state.step for found in find_checkpoints(run.folder / "checkpoints").usable)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


def before_write(monkeypatch: pytest.MonkeyPatch, hook: Callable[[int, int], None]) -> None:
    """`hook(step, unit)` is called in the saver's threads before a unit is written."""
    real = checkpoint_writer.write_unit

    def write_unit(path: Path, unit: Any, **options: Any) -> Any:
        hook(int(path.parent.name.split("-")[1].removesuffix(".partial")), unit.unit.index)
        return real(path, unit, **options)

    monkeypatch.setattr(checkpoint_writer, "write_unit", write_unit)


SETTINGS: dict[str, Any] = {"epochs": 2, "save_every": 2, "output": {"keep": 9}}


def test_the_next_step_runs_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stage(tmp_path, **SETTINGS)
    before_write(monkeypatch, lambda step, unit: until(lambda: run.executor.calls > step) if step < 9 else None)
    run.train()
    assert steps(run) == [2, 4, 6, 8, 9]
    kinds = [(line["kind"], line["step"]) for line in run.lines if line["kind"] in ("train", "save")]
    assert kinds.index(("save", 2)) > kinds.index(("train", 3)), "it was heard of when step 3 was done"


def test_a_checkpoint_is_of_its_step_though_the_optimizer_waits_for_every_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver takes no unit before the optimizer of the next step stands in front of just that one."""
    whole = stage(tmp_path / "whole", **SETTINGS)
    whole.train()
    run = stage(tmp_path / "slow", **SETTINGS)
    gate, passed = run.trainer._run.gate, []
    real = gate.before

    def before(unit: int) -> None:
        asked.append(unit)
        real(unit)
        passed.append(unit)

    asked: list[int] = []
    run.worker._before_unit = before
    waited = []

    def slow(step: int, unit: int) -> None:
        if step < 9:  # at the last one nobody waits
            until(lambda: len(asked) > step * UNITS + unit)
            waited.append((step, unit, len(passed) == step * UNITS + unit))

    before_write(monkeypatch, slow)
    run.train()
    assert waited == [(step, unit, True) for step in (2, 4, 6, 8) for unit in range(UNITS)]
    for step in (2, 4, 6, 8, 9):
        assert files(run, step) == files(whole, step)
    assert bits(run.store) == bits(whole.store)
    assert run.curve("train", "step", "loss") == whole.curve("train", "step", "loss")
    assert files(run, 4) == files(stopped_after(4, tmp_path / "four", **SETTINGS), 4), "and of a run at rest"
    stalls = dict(run.curve("save", "step", "stall_s"))
    assert all(stalls[step] > 0 for step in (2, 4, 6, 8))
    assert run.curve("save", "step", "weights_sha256") == whole.curve("save", "step", "weights_sha256")


@pytest.mark.parametrize("step", [2, 6])
def test_a_resume_from_a_checkpoint_taken_in_passing_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    run = stage(tmp_path, **SETTINGS)
    before_write(monkeypatch, lambda at, unit: until(lambda: run.executor.calls > at) if at < 9 else None)
    run.train()
    monkeypatch.undo()
    found = next(c for c in find_checkpoints(tmp_path / "checkpoints").usable if c.state.step == step)
    store = tiny_store(seed=99)
    found.load_into(store, console=RecordingConsole(), check=lambda: None)
    second = stage(tmp_path / "second", state=found.state, store=store, **SETTINGS)
    second.train()
    assert bits(second.store) == bits(run.store)
    keys = ("step", "loss", "lr", "grad_norm")
    assert second.curve("train", *keys) == run.curve("train", *keys)[step:]


def test_a_disk_slower_than_the_interval_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 1 takes until step 2 is done: that of step 2 begins after it, and none is left out."""
    run = stage(tmp_path, epochs=1, save_every=1, output={"keep": 9})
    begun = []
    before_write(monkeypatch, lambda step, unit: begun.append((step, unit)))
    run.train()
    assert begun == [(step, unit) for step in range(1, 6) for unit in range(UNITS)]
    assert steps(run) == [1, 2, 3, 4, 5]
    assert [step for (step,) in run.curve("save", "step")] == [1, 2, 3, 4, 5]
    assert run.executor.homecomings == 5


@pytest.mark.parametrize("resident", [1, 3, UNITS])
def test_units_that_live_on_the_device_are_saved_as_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: int
) -> None:
    """They are updated at once, by the trainer's thread; the store's copy is that of the snapshot until the next."""
    whole = stage(tmp_path / "whole", **SETTINGS)
    whole.train()
    run = stage(tmp_path / "run", resident=resident, **SETTINGS)

    def slow(step: int, unit: int) -> None:
        if step < 9 and unit == 0:
            until(lambda: run.executor.calls > step and run.trainer.state.step > step)

    before_write(monkeypatch, slow)
    run.train()
    for step in (2, 4, 6, 8, 9):
        assert files(run, step) == files(whole, step)
    assert bits(run.store) == bits(whole.store)


# -- failing disks ----------------------------------------------------------------------------------------


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_before_the_weights_moved_on_pauses_training_until_it_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stem could not be written, so the optimizer still stands before it: the same state is tried again."""
    whole = stage(tmp_path / "whole", **SETTINGS)
    whole.train()
    run = stage(tmp_path / "run", retry_waits_s=(0.05, 0.05, 0.05), **SETTINGS)
    left = [2]

    def full(step: int, unit: int) -> None:
        if step == 4 and left[0]:
            left[0] -= 1
            raise no_space()

    before_write(monkeypatch, full)
    run.train()
    assert sum("trying again" in text for text in run.console.told) == 2
    assert files(run, 4) == files(whole, 4)
    assert bits(run.store) == bits(whole.store)


def test_a_full_disk_after_the_weights_moved_on_begins_a_later_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stem was taken and updated; then the disk is full: step 4 cannot be had any more, step 5 or 6 can."""
    whole = stage(tmp_path / "whole", **SETTINGS)
    whole.train()
    run = stage(tmp_path / "run", retry_waits_s=(0.01,) * 3, **SETTINGS)
    gate = run.trainer._run.gate

    def full(step: int, unit: int) -> None:
        if step == 4 and unit == 1:
            until(lambda: gate._passed)
            raise no_space()

    before_write(monkeypatch, full)
    run.train()
    (told,) = [text for text in run.console.told if "given up" in text]
    assert "the checkpoint of step 4 was given up (No space left on device)" in told
    there = steps(run)
    assert 4 not in there
    assert {2, 5, 6, 8, 9} >= set(there) >= {2, 6, 8, 9}
    for step in set(there) & {2, 6, 8, 9}:
        assert files(run, step) == files(whole, step)
    assert bits(run.store) == bits(whole.store)
    assert not list((run.folder / "checkpoints").glob(".*"))


def test_a_checkpoint_after_a_lost_one_lets_no_update_through_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a disk that fails late, again and again, cannot make the run go on for ever without a checkpoint."""
    run = stage(tmp_path, retry_waits_s=(0.01,), **SETTINGS)
    gate = run.trainer._run.gate

    def full(step: int, unit: int) -> None:
        if step >= 4 and unit == 3:
            if step == 4:
                until(lambda: gate._passed)
            raise no_space()

    before_write(monkeypatch, full)
    with pytest.raises(DiskError, match=r"step-000002 is intact") as caught:
        run.train()
    assert caught.value.exit_code == 3
    assert steps(run) == [2]
    assert run.trainer.state.step <= 7


def test_a_disk_that_stays_full_ends_the_run_though_the_trainer_waits_for_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage(tmp_path, retry_waits_s=(0.01,), **SETTINGS)

    def full(step: int, unit: int) -> None:
        if step == 4:
            until(lambda: run.executor.calls >= 6)  # it waits there for the stem, and the optimizer for us
            raise no_space()

    before_write(monkeypatch, full)
    with pytest.raises(DiskError, match=r"the checkpoint of step 4 cannot be written .*step-000002 is intact"):
        run.train()
    assert steps(run) == [2]
    assert not run.trainer._saver._thread.is_alive()


@pytest.mark.parametrize(("error", "known"), [(ZeroDivisionError("in the saver"), None), (MemoryError(), DoesNotFit)])
def test_what_the_saver_dies_of_comes_home_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, known: type[Exception] | None
) -> None:
    run = stage(tmp_path, **SETTINGS)

    def fail(step: int, unit: int) -> None:
        if step == 4:
            until(lambda: run.executor.calls >= 6)
            raise error

    before_write(monkeypatch, fail)
    with pytest.raises(SaverFailed) as caught:
        run.train()
    assert caught.value.__cause__ is error
    found = machine_error(caught.value)
    assert found is None if known is None else isinstance(found, known)
    assert steps(run) == [2]


def test_the_saver_is_heard_between_two_layers_of_a_long_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor looks at the flag at every layer."""
    run = stage(tmp_path, **SETTINGS)

    def fail(step: int, unit: int) -> None:
        raise ZeroDivisionError

    def long_step(call: int) -> None:
        if call == 3:
            until(lambda: run.stop._failure is not None)
            run.stop.check_overdue()
            pytest.fail("the step went on")

    before_write(monkeypatch, fail)
    run.executor.on_step = long_step
    with pytest.raises(SaverFailed):
        run.train()
    assert run.executor.calls == 3


# -- other ends -------------------------------------------------------------------------------------------


def test_an_optimizer_that_dies_leaves_the_checkpoint_that_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails on layer 0 at step 3, while the state after step 2 is being written: that one is whole."""
    run = stage(tmp_path / "run", **SETTINGS)
    gate, updates = run.trainer._run.gate, []

    def fail(unit: int) -> None:
        gate.before(unit)
        updates.append(unit)
        if len(updates) == 2 * UNITS + 2:
            raise ZeroDivisionError

    run.worker._before_unit = fail
    dead = threading.Event()
    real = run.worker._fail
    run.worker._fail = lambda *args, **options: (real(*args, **options), dead.set())  # type: ignore[assignment]
    before_write(monkeypatch, lambda step, unit: until(dead.is_set) if unit == 2 else None)
    with pytest.raises(OptimizerFailed):
        run.train()
    assert steps(run) == [2]
    assert [step for (step,) in run.curve("save", "step")] == [2]
    assert files(run, 2) == files(stopped_after(2, tmp_path / "two", **SETTINGS), 2)


def test_an_optimizer_that_dies_in_the_step_to_be_saved_leaves_nothing_of_it(tmp_path: Path) -> None:
    run = stage(tmp_path, **SETTINGS)
    gate, updates = run.trainer._run.gate, []

    def fail(unit: int) -> None:
        gate.before(unit)
        updates.append(unit)
        if len(updates) == 2 * UNITS:
            raise ZeroDivisionError

    run.worker._before_unit = fail
    with pytest.raises(OptimizerFailed):
        run.train()
    assert steps(run) == []
    assert list((run.folder / "checkpoints").iterdir()) == []


def test_an_interrupt_while_a_checkpoint_is_written_completes_it_and_writes_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage(tmp_path, **SETTINGS)

    def interrupt(step: int, unit: int) -> None:
        if (step, unit) == (4, 1):
            until(lambda: run.executor.calls >= 5)
            run.stop.request(signal.SIGINT)

    before_write(monkeypatch, interrupt)
    with pytest.raises(Interrupted):
        run.train()
    reached = run.trainer.state.step
    assert reached in (5, 6)
    assert steps(run) == [2, 4, reached]


def test_an_interrupt_while_the_state_that_is_left_is_written_writes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stage(tmp_path, **SETTINGS)
    begun: list[int] = []

    def interrupt(step: int, unit: int) -> None:
        begun.append(step)
        if (step, unit) == (4, 0):
            until(lambda: run.stop.requested)

    before_write(monkeypatch, interrupt)
    real = run.trainer._saver.begin

    def begin(state: Any, **options: Any) -> None:
        if state.step == 4:
            run.stop.request(signal.SIGINT)
        real(state, **options)

    run.trainer._saver.begin = begin  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        run.train()
    assert begun == [2] * UNITS + [4] * UNITS
    assert steps(run) == [2, 4]
