"""No second formula: what the store and the executor really take is the plan, byte for byte and purpose by purpose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.plan.accounting import SENDS_IN_FLIGHT, MemoryPlan
from megatrain.recipe import Recipe, recipe_from_dict
from megatrain.stream.device import CpuDevice
from megatrain.train.build import Rooms, build_rooms
from megatrain.train.model_config import read_config
from megatrain.train.planning import plan_run

STORE = ("weights as streamed", "low halves of the masters", "optimizer moments", "gradients", "activations")
BUFFERS = ("weight slots", "stem and tail", "fp32 gradient sums", "gradient buffers", "resident units")

LLAMA = {"model_type": "llama", "vocab_size": 320, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536}
CASES: dict[str, dict[str, Any]] = {
    "fp32 untied": {},
    "bf16 untied": {"precision": "bf16"},
    "bf16 tied": {"precision": "bf16", "config": {"tie_word_embeddings": True}},
    "fp32 tied, bf16 moments": {"config": {"tie_word_embeddings": True}, "state": "bf16"},
    "bf16, bf16 moments": {"precision": "bf16", "state": "bf16"},
    "activations on the host": {"activations": "host", "precision": "bf16"},
    "the same, odd cut": {"activations": "host", "rows": 7, "micro": 3, "seq": 100},
    "long rows": {"seq": 2048, "rows": 2, "micro": 1, "activations": "host", "precision": "bf16"},
    "packed": {"packing": True, "precision": "bf16", "seq": 96},
    "qwen2 with biases": {"config": {"model_type": "qwen2"}, "precision": "bf16", "slots": 3},
    "odd widths": {"config": {"hidden_size": 40, "intermediate_size": 50, "vocab_size": 131}, "precision": "bf16"},
    "one layer": {"config": {"num_hidden_layers": 1}, "precision": "bf16"},
}


class Counting(CpuDevice):
    """Counts what is asked for on the device. Host buffers are the executor's own few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0

    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        self.taken += numel * dtype.itemsize
        return super().buffer(numel, dtype=dtype)


def recipe_of(folder: Path, case: dict[str, Any]) -> Recipe:

    config = LLAMA | HEADS | case.get("config", {})
    (folder / "config.json").write_text(json.dumps(config))
    return recipe_from_dict(
        {
            "model": {"path": str(folder), "init": "random"},
            "data": {"train": "none", "max_seq_len": case.get("seq", 64), "packing": case.get("packing", False)},
            "train": {"batch_size": case.get("rows", 4), "precision": case.get("precision", "fp32")},
            "optimizer": {"state": case.get("state", "fp32")},
            "memory": {
                "device": "cpu",
                "threads": 1,
                "micro_batch": case.get("micro", 2),
                "slots": case.get("slots", "auto"),
                "activations": case.get("activations", "device"),
            },
            "output": {"dir": str(folder / "run")},
        }
    )


def built(folder: Path, case: dict[str, Any], device: Counting) -> tuple[Rooms, MemoryPlan]:

    recipe = recipe_of(folder, case)
    planned = replace(plan_run(recipe, config=read_config(recipe)), device=device)
    return build_rooms(planned, fill=lambda store: None), planned.plan


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_is_what_was_planned(tmp_path: Path, name: str) -> None:
    device = Counting()
    rooms, plan = built(tmp_path, CASES[name], device)
    store = rooms.store
    try:
        planned_store = sum(plan.host.get(purpose, 0) for purpose in STORE)
        assert store.report.total_bytes == planned_store
        assert plan.host["step counts"] == sum(u.steps.numel() * u.steps.element_size() for u in store.units)
        by_purpose = {
            "optimizer moments": sum(u.exp_avg.nbytes + u.exp_avg_sq.nbytes for u in store.units),
            "low halves of the masters": sum(u.lo.nbytes for u in store.units),
        }
        for purpose, taken in by_purpose.items():
            assert 0 <= plan.host[purpose] - taken < 4096 * len(store.units)
        waiting = plan.device["activations"] - SENDS_IN_FLIGHT * plan.input_bytes if plan.load_buffers else 0
        extra = plan.device.get("slices of the head", 0)
        assert device.taken == sum(plan.device.get(purpose, 0) for purpose in BUFFERS) + waiting + extra
        rooms.executor.close()
    finally:
        rooms.worker.close()
        store.close()


def test_the_cases_differ_from_one_another(tmp_path: Path) -> None:
    seen = set()
    for number, case in enumerate(CASES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe = recipe_of(folder, case)
        plan = plan_run(recipe, config=read_config(recipe)).plan
        seen.add(
            (plan.device_total, sum(plan.host[p] for p in STORE if p in plan.host), plan.activations, plan.seq_len)
        )
    assert len(seen) == len(CASES)
