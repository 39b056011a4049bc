"""Products whose result the backward never reads: found by following them, skipped without moving a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PretrainedConfig

from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.model.unread import skip_unread
from megatrain.stream.device import CpuRng

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FOUND = {
    "llama": {"mlp.down_proj.weight"},
    "qwen2": {"mlp.down_proj.weight"},
    "starcoder2": {"mlp.c_proj.weight"},
    "phi": {"mlp.fc2.weight", "self_attn.dense.weight"},  # attention and MLP side by side
    "cohere": {"mlp.down_proj.weight", "self_attn.o_proj.weight"},
    "gemma2": set(),  # a norm reads the MLP's result
    "olmo2": set(),
    "mixtral": set(),  # expert weights scale the products
}


class CountProducts(TorchDispatchMode):
    """FLOP of matrix products while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            (rows, inner), columns = args[0].shape, args[1].shape[1]
            self.flop += 2 * rows * inner * columns
        return func(*args, **(kwargs or {}))


def config_of(kind: str) -> PretrainedConfig:
    return AutoConfig.for_model(kind, **SMALL)


def build(kind: str) -> StreamedModel:
    return StreamedModel.build(ModelSpec(config_of(kind), "auto", torch.float32, True, False), rng=CpuRng())


@pytest.mark.parametrize(("kind", "names"), FOUND.items())
def test_unread_products_are_found_by_what_autograd_keeps(kind: str, names: set[str]) -> None:
    assert build(kind)._trial.unread_in_layers == (frozenset(names),) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 32), (3, 5, 32), (1, 1, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_a_linear_layer_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    torch.manual_seed(0)
    plain, skipping = nn.Linear(32, 48, bias=bias, dtype=dtype), nn.Linear(32, 48, bias=bias, dtype=dtype)
    skipping.load_state_dict(plain.state_dict())
    holder = nn.Sequential(skipping)
    skip_unread(holder, ["0.weight"])
    rows = torch.randn(shape, dtype=dtype)
    residual = torch.randn(*shape[:-1], 48, dtype=dtype)
    slope = torch.randn(*shape[:-1], 48, dtype=dtype)
    found = []
    for module in (plain, holder):
        leaf = rows.clone().requires_grad_()
        out = residual + module(leaf)
        found.append(torch.autograd.grad(out, [leaf, *module.parameters()], slope))
    assert len(found[0]) == 2 + bias
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)
    with torch.no_grad():
        assert torch.equal(holder(rows), F.linear(rows, plain.weight, plain.bias))


def test_the_recompute_of_a_layer_leaves_the_down_projection_out() -> None:
    model = build("llama")
    stem = {e.name: torch.randn(e.shape) for e in model.anatomy.stem.layout.params}
    tail = {e.name: torch.randn(e.shape) for e in model.anatomy.tail.layout.params}
    model.bind_outer(stem=stem, tail=tail)
    ids = torch.arange(6)[None]
    labels = ids.clone()
    labels[:, 0] = IGNORE
    one = model.begin(MicroBatch(ids, labels, None, None, 6, 5), grad=True)
    weights = {e.name: torch.randn(e.shape) * 0.1 for e in model.anatomy.layers[0].layout.params}
    with CountProducts() as forward:
        out = one.forward(0, weights, one.hidden)
    with CountProducts() as backward:
        one.backward(0, weights, one.hidden, torch.ones_like(out), accumulate=lambda name, gradient: None)
    down = 2 * 6 * 32 * 64
    products = 2 * 6 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # q, o, k, v and the MLP
    assert forward.flop == products
    assert backward.flop == 3 * products - down
