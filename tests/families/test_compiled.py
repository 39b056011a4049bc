"""Compiled layers: one graph per kind and mode, close to eager (never bit-equal), the router loss included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drive import Streamed, differences, make_batches, reference_model, run_reference, run_reference_with_router_loss
from torch._dynamo.utils import counters
from variants import config_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "attention", "overrides", "graphs"),
    [
        ("llama", "sdpa", {}, 2),
        ("llama", "megatrain_varlen", {}, 2),
        ("qwen3", "sdpa", {}, 4),
        ("mixtral", "sdpa", {"output_router_logits": True}, 2),
        ("gpt2/scale_idx", "sdpa", {}, 8),
    ],
)
def test_compiled_layers(variant: str, attention: str, overrides: dict[str, Any], graphs: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    config = config_of(variant, **overrides)
    model = reference_model(config, attention="sdpa")
    streamed = Streamed(model, config=config, attention=attention, compile=True)
    batches = make_batches(2, packed=attention == "megatrain_varlen")
    if overrides:
        theirs = run_reference_with_router_loss(model, batches, coefficient=streamed.model.aux_coefficient)
    else:
        theirs = run_reference(model, batches)
    ours = streamed.step(batches)
    assert max(differences(ours, theirs).values(), default=0.0) < 1e-5
    streamed.step(batches)
    assert counters["stats"]["unique_graphs"] == graphs  # per kind one without and one with gradients
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "attention", "experts", "graphs"),
    [
        ("mixtral", "sdpa", 8, 2),
        ("gpt_oss", "eager", 8, 2),  # two kinds of layers with experts of one kind
        ("qwen3_moe", "sdpa", 8, 4),  # Hugging Face's code differs between its kinds
        ("mixtral", "sdpa", 5, 4),
        ("qwen3_moe", "sdpa", 5, 6),
    ],
)
def test_compiled_groups_of_experts(variant: str, attention: str, experts: int, graphs: int) -> None:
    """Their layers are not compiled. A graph without and one with gradients; five experts make groups of two sizes."""
    torch._dynamo.reset()
    counters.clear()
    config = config_of(variant, **{"num_experts" if variant == "qwen3_moe" else "num_local_experts": experts})
    model = reference_model(config, attention=attention)
    streamed = Streamed(model, config=config, attention=attention, groups=2, compile=True)
    batches = make_batches(2, packed=False)
    theirs = run_reference(model, batches)
    assert max(differences(streamed.step(batches), theirs).values(), default=0.0) < 1e-5
    streamed.step(batches)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
