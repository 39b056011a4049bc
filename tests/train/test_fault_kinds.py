"""What people lose in interrupted runs, kind by kind, where no other test has it to the letter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole import curve, state, train, weights, whole_recipe, write_rows

from megatrain.optim.lr import learning_rate
from megatrain.report.events import StepReport
from megatrain.train.signals import Interrupted, StopFlag

KEYS = ("step", "epoch", "loss", "lr", "grad_norm", "tokens")
EIGHT: dict[str, Any] = {"epochs": None, "steps": 8}
SHUFFLED: dict[str, Any] = {"shuffle": True, "packing": False}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def stop_at(step: int, signum: signal.Signals) -> Callable[[Any, StopFlag], None]:
    def on_event(event: Any, stop: StopFlag) -> None:
        if isinstance(event, StepReport) and event.step == step:
            stop.request(signum)

    return on_event


def test_eight_steps_are_four_and_a_resume_and_four(tmp_path: Path, rows: Path) -> None:
    """Shuffled, with dropout: losses, rates, norms and the last bits. Rows are not packed here, but elsewhere."""
    data = {"train": str(rows), "max_seq_len": 64} | SHUFFLED
    once, twice = tmp_path / "once", tmp_path / "twice"
    train(whole_recipe(once, rows=rows, data=data, train=EIGHT))
    recipe = whole_recipe(twice, rows=rows, data=data, train=EIGHT)
    with pytest.raises(Interrupted):
        train(recipe, on_event=stop_at(4, signal.SIGTERM))
    assert [step for (step,) in curve(twice, "step")] == [1, 2, 3, 4]
    assert train(recipe, resume="auto").steps == 8
    assert curve(twice, *KEYS) == curve(once, *KEYS)
    assert weights(twice) == weights(once)
    assert state(twice) == state(once)


def test_an_interrupt_at_step_three_is_resumable_at_step_three_however_seldom_is_saved(
    tmp_path: Path, rows: Path
) -> None:
    sections = {"train": {"epochs": None, "steps": 5, "save_every": 100}}
    once, twice = tmp_path / "once", tmp_path / "twice"
    train(whole_recipe(once, rows=rows, **sections))
    with pytest.raises(Interrupted) as caught:
        train(whole_recipe(twice, rows=rows, **sections), on_event=stop_at(3, signal.SIGINT))
    assert caught.value.exit_code == 130
    assert [path.name for path in (twice / "checkpoints").iterdir()] == ["step-000003"]
    assert json.loads((twice / "run.json").read_text())["checkpoint"].endswith("step-000003")
    train(whole_recipe(twice, rows=rows, **sections), resume="auto")
    assert curve(twice, *KEYS) == curve(once, *KEYS)
    assert weights(twice) == weights(once)


def test_more_steps_on_resume_follow_the_schedule_of_the_new_total(tmp_path: Path, rows: Path) -> None:
    """Step k has the rate of step k in a run of that length from the start; what was trained keeps the rates it had."""
    folder = tmp_path / "run"
    optimizer = {"lr": 1e-3, "schedule": "cosine", "warmup": 2}

    def rates(total: int, steps: range) -> list[float]:
        known: Any = {"total": total, **optimizer}
        return [learning_rate(k, **known) for k in steps]

    train(whole_recipe(folder, rows=rows, optimizer=optimizer, train=EIGHT | {"steps": 4}))
    train(whole_recipe(folder, rows=rows, optimizer=optimizer, train=EIGHT | {"steps": 7}), resume="auto")
    assert [lr for (lr,) in curve(folder, "lr")] == rates(4, range(1, 5)) + rates(7, range(5, 8))


@pytest.mark.slow
def test_memory_faults_files_and_threads_stand_still() -> None:
    """The soak that any developer can run, cut short: it ends with 1 and says what grew."""
    soak = Path(__file__).with_name("soak.py")
    done = subprocess.run([sys.executable, str(soak), "--steps", "240"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing grew"
