"""Attention kept from the forward: the bits of a recompute, at every call, eager and compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from drive import Streamed, differences, make_batches, reference_model
from torch import nn
from torch._dynamo.utils import counters
from variants import attention_of, config_of

from megatrain.model.attention import VARLEN, Documents, use_documents, varlen_attention
from megatrain.model.batch import MicroBatch
from megatrain.model.kept_attention import begin_exchange

ROWS, LENGTH, SIZE = 2, 32, 16
PACKED = Documents(torch.tensor([0, 5, 20, 32, 50, 64, 64, 64], dtype=torch.int32), 32, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize(
    ("documents", "window"), [(None, -1), (PACKED, -1), (PACKED, 7)], ids=["rows", "documents", "windows"]
)
def test_a_call_gives_the_same_bits(documents: Documents | None, window: int, groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.megatrain_window = (window, 0)
    use_documents(documents)
    states = [
        torch.randn(ROWS, LENGTH, heads, SIZE, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (8, groups, groups)
    ]
    plain, _ = varlen_attention(module, *states, None)
    slope = torch.randn_like(plain)
    noted = begin_exchange(noting=True)
    first, _ = varlen_attention(module, *states, None)
    begin_exchange(given=noted)
    again, _ = varlen_attention(module, *states, None)
    begin_exchange()
    assert len(noted) == 2
    assert torch.equal(first, plain)
    assert torch.equal(again, plain)
    expected, found = torch.autograd.grad(plain, states, slope), torch.autograd.grad(again, states, slope)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3", "mixtral"])
def test_a_step_gives_the_same_bits(variant: str, packed: bool) -> None:
    config = config_of(variant)
    streamed = Streamed(reference_model(config, attention="sdpa"), config=config, attention=VARLEN)
    assert streamed.model.attention == VARLEN
    batches = make_batches(2, packed=packed)
    plain = streamed.step(batches)
    kept = streamed.step(batches, keep_attention=True)
    assert streamed.attention_calls == 2 * config.num_hidden_layers
    assert torch.equal(kept.loss, plain.loss)
    assert kept.gradients.keys() == plain.gradients.keys()
    assert all(torch.equal(kept.gradients[name], plain.gradients[name]) for name in plain.gradients)


@pytest.mark.parametrize(
    ("variant", "layers"), [("llama", {0, 1, 2, 3}), ("qwen3", {0, 1}), ("mistral", set()), ("gemma2", set())]
)
def test_only_layers_that_see_whole_documents_are_worth_it(variant: str, layers: set[int]) -> None:
    config = config_of(variant)
    attention = attention_of(variant)
    streamed = Streamed(reference_model(config, attention=attention), config=config, attention=VARLEN)
    assert streamed.model.attention_layers == layers
    assert streamed.model.sizes.attention_layers == len(layers)
    heads, size = config.num_attention_heads, getattr(config, "head_dim", None) or 0
    size = size or config.hidden_size // heads
    assert streamed.model.sizes.attention_bytes_per_token == (heads * (size * 4 + 4) if layers else 0)


def test_attention_that_is_not_ours_is_recomputed() -> None:
    config = config_of("llama")
    streamed = Streamed(reference_model(config, attention="sdpa"), config=config, attention="sdpa")
    batches = make_batches(2)
    kept = streamed.step(batches, keep_attention=True)
    assert streamed.attention_calls == 0
    assert differences(kept, streamed.step(batches)) == {}


@pytest.mark.slow
def test_compiled_layers_keep_it_too() -> None:
    torch._dynamo.reset()
    counters.clear()
    config = config_of("llama")
    streamed = Streamed(reference_model(config, attention="sdpa"), config=config, attention=VARLEN, compile=True)
    batches = make_batches(2, packed=True)
    plain = streamed.step(batches)
    kept = streamed.step(batches, keep_attention=True)
    assert streamed.attention_calls == 2 * config.num_hidden_layers
    assert max(differences(kept, plain).values(), default=0.0) < 1e-6
    streamed.step(batches, keep_attention=True)
    assert counters["stats"]["unique_graphs"] == 4  # plain: without and with gradients; noted; given
    assert not counters["graph_break"]


@pytest.mark.slow
def test_documents_of_every_length_stay_within_the_limit_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each power of two that the longest document is rounded to has graphs of its own, for few rows and many."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = config_of("llama")
    config.num_hidden_layers = 1
    streamed = Streamed(reference_model(config, attention="sdpa"), config=config, attention=VARLEN, compile=True)
    for rows in (2, 3, 1):
        for longest in (12, 24, 50, 100, 200, 400, 512):
            ids = torch.arange(rows * 512).view(rows, 512) % 200 + 3
            positions = (torch.arange(512) % longest).expand(rows, -1)
            batch = MicroBatch(ids, ids, positions, None, ids.numel(), ids.numel())
            streamed.step([batch], keep_attention=True)
            streamed.evaluate(batch)
    assert counters["stats"]["unique_graphs"] > 32
