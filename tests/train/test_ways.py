"""How a model is computed, by what a GPU can do."""

from __future__ import annotations

import pytest

from megatrain.recipe import load_recipe
from megatrain.train.gpus import GpuFacts
from megatrain.train.machine import Described, find_machine
from megatrain.train.ways import Capability, Ways

OPEN = ["data.train=megatrain:devil.jsonl", "memory.device=auto"]


def ways(*settings: str, on_cuda: bool = True, capability: Capability | None = None) -> tuple[bool, bool, bool]:
    found = Ways.of(load_recipe("smollm2-135m", overrides=[*OPEN, *settings]), on_cuda=on_cuda, capability=capability)
    return found.bf16, found.ours, found.compiled


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, (True, True, True)),  # described, not seen
        ((9, 0), (True, True, True)),
        ((8, 0), (True, True, True)),
        ((12, 0), (True, True, True)),
        ((7, 5), (False, False, True)),
        ((6, 1), (False, False, False)),
    ],
)
def test_what_a_recipe_leaves_open_follows_the_gpu(
    capability: Capability | None, expected: tuple[bool, bool, bool]
) -> None:
    assert ways(capability=capability) == expected


def test_what_a_recipe_says_stands() -> None:
    assert ways("train.precision=bf16", capability=(7, 5)) == (True, False, True)  # emulated; our kernels are not there
    assert ways("train.precision=fp32", capability=(9, 0)) == (False, False, True)
    assert ways("model.attention=sdpa", capability=(9, 0)) == (True, False, True)
    assert ways("memory.compile=off", capability=(9, 0)) == (True, True, False)
    assert ways(on_cuda=False) == (False, False, False)


def test_a_machine_that_is_described_is_not_as_old_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    card = GpuFacts(0, "Tesla T4", "580.1", 16 << 30, 15 << 30, 3, 3, 16, 16, capability=(7, 5))
    monkeypatch.setattr("megatrain.train.machine.read_gpu", lambda index: card)
    recipe = load_recipe("smollm2-135m", overrides=OPEN)
    here = find_machine(recipe, Described())
    assert (here.ways.bf16, here.ways.ours) == (False, False)
    assert any("fp32 weights and PyTorch's attention" in line for line in here.assumed)
    there = find_machine(recipe, Described(vram=24 << 30))
    assert (there.ways.bf16, there.ways.ours) == (True, True)
