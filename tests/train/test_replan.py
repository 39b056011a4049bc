"""Out of memory after all: in the first step the run is cut smaller and goes on, later it ends with its state saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP
from whole import curve, session, state, train, weights, whole_recipe, write_rows

from megatrain.errors import DoesNotFit
from megatrain.recipe import Recipe
from megatrain.stream.device import CpuDevice
from megatrain.train.manifest import read_manifest

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


class Crowded:
    """A device that has no room for an operation while `full` says so. Counts what it saw."""

    def __init__(self, full: Callable[[str, int], bool]) -> None:
        self.full, self.seen = full, 0

    def touch(self, device: CpuDevice, what: str, **_: Any) -> None:
        self.seen += what.startswith("backward(")
        if self.full(what, self.seen):
            raise torch.OutOfMemoryError(FULL)


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int], bool]], Crowded]:
    def install(full: Callable[[str, int], bool]) -> Crowded:
        crowded = Crowded(full)
        monkeypatch.setattr(CpuDevice, "touch", lambda device, what, **more: crowded.touch(device, what, **more))
        return crowded

    return install


def once(what: str) -> Callable[[str, int], bool]:
    """Full at the first operation of this name only."""
    left = [1]

    def full(seen: str, _: int) -> bool:
        hit = bool(left) and seen.startswith(what)
        if hit:
            left.clear()
        return hit

    return full


def four_at_once(folder: Path, rows: Path, **memory: Any) -> Recipe:
    settings = {"device": "cpu", "compile": "off", "micro_batch": 4, "threads": 2} | memory
    return whole_recipe(folder, rows=rows, memory=settings, data={"eval_fraction": 0.2})


@pytest.mark.parametrize("activations", ["device", "host"])
@pytest.mark.parametrize("operation", ["backward(3", "embed(", "loss("])
def test_in_the_first_step_the_run_is_cut_smaller_and_is_that_of_the_smaller_cut(
    tmp_path: Path, rows: Path, crowd: Any, operation: str, activations: str
) -> None:
    small = four_at_once(tmp_path / "small", rows, micro_batch=2, activations=activations)
    train(small)
    crowd(once(operation))
    cut = session(four_at_once(tmp_path / "cut", rows, activations=activations))
    report = cut.run()
    assert report.status == "done"
    told = "\n".join(str(line) for line in cut.told)  # type: ignore[attr-defined]
    assert "micro-batches of 2 rows (were 4)" in told
    assert "nothing was updated yet" in told
    assert curve(tmp_path / "cut", "step", "loss", "grad_norm") == curve(
        tmp_path / "small", "step", "loss", "grad_norm"
    )
    assert weights(tmp_path / "cut") == weights(tmp_path / "small")
    assert curve(tmp_path / "cut", "loss", kind="eval") == curve(tmp_path / "small", "loss", kind="eval")


def test_the_checkpoint_says_how_the_run_was_really_cut(tmp_path: Path, rows: Path, crowd: Any) -> None:
    crowd(once("backward("))
    train(four_at_once(tmp_path / "cut", rows))
    (newest,) = (tmp_path / "cut/checkpoints").glob("step-*")
    plan = read_manifest(newest).identity.plan
    assert (plan["micro_batch"], plan["micro_batches"]) == (2, 2)


@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside a layer"])
@pytest.mark.parametrize("activations", ["device", "host"])
def test_what_the_device_held_is_gone_before_anything_new_is_taken(
    tmp_path: Path, rows: Path, crowd: Any, monkeypatch: pytest.MonkeyPatch, activations: str, *, inside: bool
) -> None:
    buffers: list[weakref.ref[Any]] = []
    alive: list[int] = []
    crowded = crowd(once("never" if inside else "backward(3"))
    if inside:
        full, forward = once(""), LlamaMLP.forward

        def crowded_forward(module: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
            if crowded.seen > 1 and full("", 0):
                raise torch.OutOfMemoryError(FULL)
            return cast(torch.Tensor, forward(module, hidden))

        monkeypatch.setattr(LlamaMLP, "forward", crowded_forward)

    def buffer(device: CpuDevice, numel: int, *, dtype: torch.dtype) -> torch.Tensor:
        if crowded.seen and not alive:
            gc.collect()
            alive.append(sum(ref() is not None for ref in buffers))
        memory = np.zeros(numel * dtype.itemsize, np.uint8)  # lives as long as any view of its storage
        buffers.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(dtype)

    monkeypatch.setattr(CpuDevice, "buffer", buffer)
    train(four_at_once(tmp_path / "cut", rows, activations=activations))
    assert len(buffers) > 10
    assert alive == [0]


def test_it_is_halved_until_it_fits(tmp_path: Path, rows: Path, crowd: Any) -> None:
    left = [1, 1]

    def twice(what: str, _: int) -> bool:
        return what.startswith("backward(") and bool(left) and left.pop() == 1

    crowd(twice)
    cut = session(four_at_once(tmp_path / "cut", rows))
    assert cut.run().status == "done"
    told = "\n".join(str(line) for line in cut.told)  # type: ignore[attr-defined]
    assert "micro-batches of 2 rows (were 4)" in told
    assert "micro-batches of 1 rows (were 2)" in told


def test_where_one_row_is_too_much_it_ends_with_the_plans_numbers(tmp_path: Path, rows: Path, crowd: Any) -> None:
    crowd(lambda what, _: what.startswith("backward("))
    with pytest.raises(DoesNotFit, match="the device ran out of memory") as caught:
        train(four_at_once(tmp_path / "cut", rows))
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "Planned were" in text
    assert FULL in text
    assert "memory.vram" in text


def test_later_the_state_is_saved_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, rows: Path, crowd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(four_at_once(tmp_path / "whole", rows, micro_batch=2))
    recipe = four_at_once(tmp_path / "run", rows, micro_batch=2)
    layers_and_cuts = 4 * 2
    crowd(lambda _, seen: seen > 3 * layers_and_cuts)  # in the fourth step
    with pytest.raises(DoesNotFit) as caught:
        train(recipe)
    assert caught.value.exit_code == 3
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-000003"]
    assert train(recipe, resume="auto").status == "done"
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert state(tmp_path / "run") == state(tmp_path / "whole")
