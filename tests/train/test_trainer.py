"""The loop against a device of a few lines: what follows what, and that nothing is lost or done twice."""

from __future__ import annotations

import errno
import math
import signal
import threading
from pathlib import Path

import pytest
import torch
from fakes import FakeLoader, FakeNumbers, RecordingConsole, Stage, bits, stage, tiny_store

from megatrain.errors import DoesNotFit, NonFinite
from megatrain.optim.lr import learning_rate
from megatrain.optim.worker import OptimizerFailed
from megatrain.train.checkpoint import find_checkpoints
from megatrain.train.failure import machine_error
from megatrain.train.intervals import Interval, total_steps
from megatrain.train.signals import Interrupted
from megatrain.train.state import TrainState, step_seed
from megatrain.train.trainer import clip_factor
from megatrain.units import Duration

NAN = FakeNumbers(float("nan"), 1.0)


def resume(folder: Path, **train: object) -> Stage:
    """A new process: an empty store filled from the newest checkpoint."""
    newest = find_checkpoints(folder / "checkpoints").usable[0]
    store = tiny_store(seed=99)
    newest.load_into(store, console=RecordingConsole(), check=lambda: None)
    return stage(folder, state=newest.state, store=store, **train)


def test_a_run_takes_every_step_of_its_epochs_once_and_ends_with_a_checkpoint(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=2)
    run.train()
    assert run.executor.rows == [(0, i) for i in range(5)] + [(1, i) for i in range(4)]
    assert run.curve("train", "step", "epoch") == [
        *[(k, k / 5) for k in range(1, 5)],
        (5, 1.0),
        *[(5 + k, 1 + k / 4) for k in range(1, 4)],
        (9, 2.0),
    ]
    assert [line["step"] for line in run.lines if line["kind"] == "save"] == [9]
    assert run.trainer.state.tokens == 9 * 24
    assert run.trainer.state.supervised_tokens == 9 * 10
    losses = [loss for (loss,) in run.curve("train", "loss")]
    assert (run.trainer.state.first_loss, run.trainer.state.last_loss) == (losses[0], losses[-1])
    assert len(set(losses)) == 9, "each step saw the weights of the one before"


@pytest.mark.parametrize(
    ("epochs", "steps", "total"), [(2, None, 9), (None, 7, 7), (2, 7, 7), (2, 70, 9), (4, None, 19)]
)
def test_total_steps(epochs: int | None, steps: int | None, total: int) -> None:
    assert total_steps(FakeLoader(), epochs=epochs, steps=steps) == total


def test_learning_rates_follow_the_schedule(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=2, optimizer={"lr": 1e-3, "warmup": 3, "schedule": "linear"})
    run.train()
    wanted = [learning_rate(k, total=9, lr=1e-3, warmup=3, schedule="linear") for k in range(1, 10)]
    assert [lr for (lr,) in run.curve("train", "lr")] == wanted
    assert all(lr > 0 for lr in wanted)


@pytest.mark.parametrize("first_steps", [1, 4, 5, 7, 8])
def test_interrupted_and_resumed_ends_in_the_same_bits(tmp_path: Path, first_steps: int) -> None:
    """Across an epoch's end, at it, and with evaluations: losses, learning rates, evaluations, optimizer state."""
    settings = {"epochs": 2, "eval_every": 2, "eval_groups": 2}
    whole = stage(tmp_path / "whole", **settings)
    whole.train()

    first = stage(tmp_path / "parts", **settings)
    first.executor.on_step = lambda call: first.stop.request(signal.SIGTERM) if call == first_steps else None
    with pytest.raises(Interrupted) as caught:
        first.train()
    assert caught.value.exit_code == 143
    assert first.trainer.state.step == first_steps
    second = resume(tmp_path / "parts", **settings)
    second.train()

    for kind, keys in (("train", ("step", "loss", "lr", "grad_norm", "epoch")), ("eval", ("step", "loss"))):
        assert second.curve(kind, *keys) == whole.curve(kind, *keys)
    assert bits(second.store) == bits(whole.store)
    assert second.trainer.state == whole.trainer.state


def test_a_killed_process_repeats_the_steps_after_its_last_checkpoint(tmp_path: Path) -> None:
    whole = stage(tmp_path / "whole", epochs=2)
    whole.train()

    class Killed(BaseException):
        pass

    def kill(call: int) -> None:
        if call == 8:
            raise Killed

    first = stage(tmp_path / "parts", epochs=2, save_every=3)
    first.executor.on_step = kill
    with pytest.raises(Killed):
        first.train()
    assert [step for (step,) in first.curve("train", "step")] == list(range(1, 8))
    second = resume(tmp_path / "parts", epochs=2, save_every=3)
    assert second.trainer.state.step == 6
    second.train()
    assert second.curve("train", "step", "loss") == whole.curve("train", "step", "loss")
    assert bits(second.store) == bits(whole.store)


def test_more_epochs_on_resume_go_on_where_the_run_ended(tmp_path: Path) -> None:
    stage(tmp_path, epochs=1, optimizer={"lr": 1e-3, "warmup": 0, "schedule": "linear"}).train()
    second = resume(tmp_path, epochs=2, optimizer={"lr": 1e-3, "warmup": 0, "schedule": "linear"})
    second.train()
    assert second.executor.rows == [(1, i) for i in range(4)]
    rates = dict(second.curve("train", "step", "lr"))
    assert rates[6] == learning_rate(6, total=9, lr=1e-3, warmup=0, schedule="linear")


def test_an_interrupt_in_the_middle_of_a_step_saves_the_step_before(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1)

    def overdue(call: int) -> None:
        if call == 3:
            run.stop.request(signal.SIGINT)
            run.stop.check()  # what PolledUpdates does between two layers of a step that takes too long

    run.executor.on_step = overdue
    with pytest.raises(Interrupted):
        run.train()
    assert find_checkpoints(tmp_path / "checkpoints").usable[0].state.step == 2


def test_an_interrupt_before_the_first_step_writes_no_checkpoint(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1)
    run.stop.request(signal.SIGINT)
    with pytest.raises(Interrupted):
        run.train()
    assert not (tmp_path / "checkpoints").exists()
    assert run.executor.calls == 0


def test_an_interrupted_evaluation_is_made_up_for(tmp_path: Path) -> None:
    settings = {"epochs": 1, "eval_every": 2, "eval_groups": 3}
    whole = stage(tmp_path / "whole", **settings)
    whole.train()
    assert [step for (step,) in whole.curve("eval", "step")] == [0, 2, 4, 5]

    first = stage(tmp_path / "parts", **settings)
    sweeps = iter(range(100))
    first.executor.on_evaluate = lambda: first.stop.request(signal.SIGINT) if next(sweeps) == 4 else None
    with pytest.raises(Interrupted):
        first.train()
    assert first.trainer.state.step == 2
    assert [step for (step,) in first.curve("eval", "step")] == [0]
    second = resume(tmp_path / "parts", **settings)
    second.train()
    assert second.curve("eval", "step", "loss") == whole.curve("eval", "step", "loss")


# -- numbers that are not finite --------------------------------------------------------------------------


def test_stop_saves_the_last_good_state_and_the_step_can_be_taken_again(tmp_path: Path) -> None:
    whole = stage(tmp_path / "whole", epochs=1)
    whole.train()
    run = stage(tmp_path / "parts", epochs=1)
    run.executor.spoil[3] = NAN
    with pytest.raises(NonFinite, match=r"the loss is nan.*state after step 2 is saved") as caught:
        run.train()
    assert caught.value.exit_code == 4
    assert "step 3" in str(caught.value)
    second = resume(tmp_path / "parts", epochs=1)
    second.train()
    assert bits(second.store) == bits(whole.store)


@pytest.mark.parametrize("spoiled", [NAN, FakeNumbers(1.0, math.inf), FakeNumbers(math.inf, math.nan)])
def test_skip_touches_nothing_and_counts(tmp_path: Path, spoiled: FakeNumbers) -> None:
    run = stage(tmp_path, epochs=1, nonfinite="skip")
    before: dict[int, list[bytes]] = {}

    def remember(call: int) -> None:
        run.worker.drain()
        before[call] = bits(run.store)

    run.executor.on_step = remember
    run.executor.spoil[3] = spoiled
    run.train()
    assert before[3] == before[4] != before[5]
    assert [(line["kind"], line["step"]) for line in run.lines if line["kind"] in ("train", "skip")] == [
        ("train", 1),
        ("train", 2),
        ("skip", 3),
        ("train", 4),
        ("train", 5),
    ]
    assert run.executor.rows == [(0, i) for i in range(5)], "its data is used up"
    fourth = learning_rate(4, total=5, lr=1e-5, warmup=0.03, schedule="cosine")
    assert run.curve("train", "step", "lr")[2] == (4, fourth), "the schedule goes on"
    assert run.trainer.state.skipped_steps == 1
    assert run.trainer.state.tokens == 5 * 24
    assert int(run.store.stem.steps[0]) == 4


@pytest.mark.parametrize(("steps", "most", "reached"), [(3, 25, 3), (9, 4, 5)])
def test_nothing_but_skipped_steps_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, most: int, reached: int
) -> None:
    monkeypatch.setattr("megatrain.train.nonfinite.SKIPS", most)
    run = stage(tmp_path, epochs=None, steps=steps, nonfinite="skip")
    first = 1 if steps == 3 else 2  # every step; or one is good, and four in a row are not
    run.executor.spoil |= dict.fromkeys(range(first, steps + 1), FakeNumbers(math.nan, 1.0))
    with pytest.raises(NonFinite, match="one after the other, and none of them touched a weight"):
        run.train()
    assert run.trainer.state.step == reached
    assert [line["step"] for line in run.lines if line["kind"] == "save"] == [reached], "and what is left is saved"


def test_a_step_that_is_not_finite_says_where(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1, nonfinite="skip")
    run.executor.spoil[3] = FakeNumbers(2.0, math.inf)
    run.executor.spoil[4] = NAN
    run.executor.unit_norms = {0: math.inf, 1: 1.0, 2: math.nan, 3: 1.0}
    run.train()
    third, fourth = (line for line in run.lines if line["kind"] == "skip")
    assert (third["rows"], third["layers"]) == (["rows.jsonl: row 3"], ["layer 1", "stem"])
    assert third["reason"] == (
        "the gradient norm is inf, somewhere in rows.jsonl: row 3; the gradient of layer 1, stem is not finite"
    )
    assert fourth["reason"].startswith("the loss is nan, in rows.jsonl: row 4")
    stopped = stage(tmp_path / "stop", epochs=1)
    stopped.executor.spoil[3] = NAN
    stopped.executor.unit_norms = dict.fromkeys(range(4), math.nan)
    with pytest.raises(NonFinite, match=r"in rows\.jsonl: row 3; every layer's gradient is affected; no weight was"):
        stopped.train()


def test_a_loss_far_above_the_usual_is_noted_and_changes_nothing(tmp_path: Path) -> None:
    settings = {"epochs": None, "steps": 40, "log_every": 40}
    calm = stage(tmp_path / "calm", **settings)
    calm.train()
    run = stage(tmp_path / "spiky", **settings)
    run.executor.spoil[30] = FakeNumbers(1e9, 1.0)
    run.train()
    lines = {line["step"]: line for line in run.lines if line["kind"] == "train"}
    assert lines.keys() == {1, 30, 40}, "a spike is logged whatever log_every says"
    assert lines[1]["loss_spike"] is None
    assert 0 < lines[30]["loss_spike"] < 1e9
    assert any(text.startswith("warning: step 30: the loss is 1000000000.0000, far above") for text in run.console.told)
    assert not any("far above" in text for text in calm.console.told)


@pytest.mark.parametrize(("long_s", "save_every", "told"), [(0.0, None, 1), (0.0, 4, 0), (1e6, None, 0)])
def test_a_long_run_without_checkpoints_on_the_way_is_told_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_s: float, save_every: int | None, told: int
) -> None:
    monkeypatch.setattr("megatrain.train.notices.LONG_S", long_s)
    run = stage(tmp_path, epochs=None, steps=6, save_every=save_every)
    run.train()
    assert sum("no checkpoint on the way" in text for text in run.console.told) == told


def test_ignore_looks_at_nothing(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1, nonfinite="ignore")
    run.executor.spoil[3] = NAN
    run.train()
    assert [step for (step,) in run.curve("train", "step")] == [1, 2, 3, 4, 5]
    assert run.curve("train", "loss")[2] == (None,)


@pytest.mark.parametrize("norm", [0.0, 1e-9, 0.5, 1.0, 3.7, 1e30, math.inf, math.nan])
def test_the_clip_factor_is_torchs(norm: float) -> None:
    (parameter,) = torch.nn.ParameterList([torch.zeros(1, dtype=torch.float64)])
    parameter.grad = torch.ones(1, dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_([parameter], 1.0, torch.tensor(norm, dtype=torch.float64))
    ours = torch.tensor([clip_factor(norm, limit=1.0)], dtype=torch.float64)
    assert torch.equal(ours.nan_to_num(7.0), parameter.grad.nan_to_num(7.0))


def test_no_clipping() -> None:
    assert clip_factor(1e9, limit=None) == 1.0


# -- intervals, order, failures ---------------------------------------------------------------------------


def test_saves_by_steps_epochs_and_time(tmp_path: Path) -> None:
    for name, every, wanted in (("steps", 4, [4, 8, 9]), ("epochs", "1 epoch", [5, 9])):
        run = stage(tmp_path / name, epochs=2, save_every=every, output={"keep": 10})
        run.train()
        assert [step for (step,) in run.curve("save", "step")] == wanted
    now = [0.0]
    interval = Interval(Duration(30, "seconds"), clock=lambda: now[0])
    for now[0], due in ((29.0, False), (30.0, True), (45.0, True)):
        assert interval.due(TrainState(step=3)) is due
    interval.restart()
    now[0] = 74.0
    assert not interval.due(TrainState(step=4))


def test_the_next_step_does_not_wait_for_the_whole_update(tmp_path: Path) -> None:
    """While the worker is still at the tail, the trainer is already inside the next step."""
    run = stage(tmp_path, epochs=None, steps=2)
    inside = threading.Event()
    run.worker._before_unit = lambda unit: unit == 3 and run.executor.calls == 1 and inside.wait(20)  # type: ignore
    run.executor.on_step = lambda call: inside.set() if call == 2 else None
    run.train()
    assert inside.is_set()
    assert run.trainer.state.step == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), OSError(errno.ENOSPC, "full")])
def test_what_the_machine_lacks_ends_the_run_with_its_last_step_saved(tmp_path: Path, error: Exception) -> None:
    run = stage(tmp_path, epochs=1)

    def fail(call: int) -> None:
        if call == 3:
            raise error

    run.executor.on_step = fail
    with pytest.raises(type(error)):
        run.train()
    assert [c.state.step for c in find_checkpoints(tmp_path / "checkpoints").usable] == [2]


def test_what_the_optimizers_thread_lacked_is_no_bug_of_ours(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1)

    def fail(unit: int) -> None:
        raise MemoryError

    run.worker._before_unit = fail
    with pytest.raises(OptimizerFailed) as caught:
        run.train()
    assert isinstance(machine_error(caught.value), DoesNotFit)
    assert not (tmp_path / "checkpoints").exists()


def test_a_failing_optimizer_ends_the_run_with_its_cause_and_no_checkpoint(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=1)

    def fail(unit: int) -> None:
        raise ZeroDivisionError("in the worker")

    run.worker._before_unit = fail
    with pytest.raises(OptimizerFailed) as caught:
        run.train()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not (tmp_path / "checkpoints").exists()


def test_log_every_thins_the_lines_but_not_the_ends(tmp_path: Path) -> None:
    run = stage(tmp_path, epochs=2, log_every=4)
    run.train()
    assert [step for (step,) in run.curve("train", "step")] == [1, 4, 8, 9]


def test_seeds_differ_by_step_and_by_run() -> None:
    seeds = {step_seed(seed, step=step) for seed in range(10) for step in range(1, 100)}
    assert len(seeds) == 990
    assert all(0 <= seed < 1 << 63 for seed in seeds)
