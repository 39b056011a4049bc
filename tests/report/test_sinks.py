"""TensorBoard and Weights & Biases get the same numbers as metrics.jsonl."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_metrics import evaluation, save, step

from megatrain.errors import UsageError
from megatrain.report.sinks import check_available, open_sinks, scalars


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_available(tensorboard=False, wandb=False)
    for wanted in ("tensorboard", "wandb"):
        with pytest.raises(UsageError, match=wanted) as caught:
            check_available(tensorboard=wanted == "tensorboard", wandb=wanted == "wandb")
        assert f"megatrain[{wanted}]" in (caught.value.hint or "")


def test_curves() -> None:
    assert scalars(step(3))["train/loss"] == 2.5
    assert scalars(evaluation(3))["eval/loss"] == 1.0
    assert scalars(save(3)) == {}
    assert "train/aux_loss" not in scalars(step(3))


class Service(ModuleType):
    """As much of wandb as we use."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **settings: Any) -> Service:
        self.started.append(settings)
        return self

    def log(self, curves: dict[str, float], *, step: int) -> None:
        self.logged.append((step, curves))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on_with_its_run_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    for resumed_step in (None, 2, None):
        (sink,) = open_sinks(tmp_path, tensorboard=False, wandb="project", config={"a": 1}, resumed_step=resumed_step)
        sink.write(step(3))
        sink.write(save(3))
        sink.close()
    first, resumed, fresh = (settings["id"] for settings in service.started)
    assert first == resumed != fresh
    assert service.started[0]["project"] == "project"
    assert [(k, curves["train/loss"]) for k, curves in service.logged] == [(3, 2.5)] * 3
    assert service.finished == 3


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_step, events in ((None, [step(1), evaluation(1), step(2), step(3)]), (1, [step(2), step(3)])):
        (sink,) = open_sinks(tmp_path, tensorboard=True, wandb=None, config={}, resumed_step=resumed_step)
        for event in events:
            sink.write(event)
        sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 2.5), (2, 2.5), (3, 2.5)]
    assert [e.step for e in read.Scalars("eval/loss")] == [1]
