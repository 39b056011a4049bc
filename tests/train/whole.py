"""Whole runs on the shipped million-parameter model, small enough for a test."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from fakes import RecordingConsole

from megatrain.recipe import Recipe, recipe_from_dict
from megatrain.report.console import Console
from megatrain.report.events import RunReport, StepReport
from megatrain.report.metrics import read_metrics
from megatrain.train.session import Session
from megatrain.train.signals import Interrupted, StopFlag

WORDS = ("abacus", "bait", "cabbage", "dawn", "ear", "fault", "gallows", "habit", "idiot", "jealous", "king", "labor")


def write_rows(path: Path, *, words: Sequence[str] = WORDS) -> Path:
    with path.open("w") as file:
        for number, word in enumerate(words):
            question = {"role": "user", "content": f"Define {word}."}
            answer = {"role": "assistant", "content": f"{word}, n. What a test of {word} is made of, {number} times."}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")
    return path


def whole_recipe(folder: Path, *, rows: Path, **sections: dict[str, Any]) -> Recipe:
    """Six steps over two epochs: packed rows, shuffled, with dropout."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "megatrain:kjv-tiny", "config": {"attention_dropout": 0.2}},
        "data": {"train": str(rows), "max_seq_len": 64},
        "train": {"epochs": 2, "batch_size": 4},
        "optimizer": {"lr": 1e-3},
        "memory": {"device": "cpu", "compile": "off", "micro_batch": 2, "threads": 2},
        "output": {"dir": str(folder)},
    }
    return recipe_from_dict({name: values.get(name, {}) | sections.get(name, {}) for name in (*values, *sections)})


def session(
    recipe: Recipe, *, resume: str = "never", on_event: Callable[[Any, StopFlag], None] = lambda event, stop: None
) -> Session:
    """`on_event` hears every step, evaluation and save, and may raise the flag."""
    stop, console = StopFlag(), RecordingConsole()
    heard = console.events.append

    def step(event: Any) -> None:
        heard(event)
        on_event(event, stop)

    console.step = console.skipped = console.evaluated = console.saved = step  # type: ignore[method-assign]
    made = Session(recipe, resume=resume, console=cast(Console, console), stop=stop)
    made.told = console.told  # type: ignore[attr-defined]
    return made


def train(recipe: Recipe, **options: Any) -> RunReport:
    return session(recipe, **options).run()


def assert_resumed_as_undisturbed(recipe_of: Callable[[Path], Recipe], folder: Path, *, keys: Sequence[str]) -> None:
    """A run that is interrupted at its second step and resumed ends as one that was not, in every bit."""
    whole, parts = folder / "undisturbed", folder / "parts"
    train(recipe_of(whole))

    def stop_after_second(event: Any, stop: StopFlag) -> None:
        if isinstance(event, StepReport) and event.step == 2:
            stop.request(signal.SIGTERM)

    recipe = recipe_of(parts)
    with pytest.raises(Interrupted):
        train(recipe, on_event=stop_after_second)
    train(recipe, resume="auto")
    assert curve(parts, *keys) == curve(whole, *keys)
    assert weights(parts) == weights(whole)
    assert state(parts) == state(whole)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def state(folder: Path) -> dict[str, bytes]:
    """The tensors of the newest checkpoint, file by file."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def curve(folder: Path, *keys: str, kind: str = "train") -> list[tuple[Any, ...]]:
    return [tuple(line[key] for key in keys) for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == kind]
