"""Units, sizes, kinds, documents: what other rooms build on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_refusals import NoRng, tiny
from torch import Tensor
from transformers import AutoConfig

from megatrain.model.attention import VARLEN, Documents, varlen_by_mask
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.model.tail import Head, tail_loss


def build(config: Any, *, precision: torch.dtype = torch.float32, attention: str = "sdpa") -> StreamedModel:
    return StreamedModel.build(ModelSpec(config, attention, precision, training=True, compile=False), rng=NoRng())


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_unit(tied: bool) -> None:
    model = build(tiny(tie_word_embeddings=tied))
    anatomy = model.anatomy
    names = [n for unit in anatomy.units for full in unit.full_names.values() for n in full]
    assert sorted(names) == sorted(n for n, _ in model.meta_model.named_parameters(remove_duplicate=False))
    assert [e.name for e in anatomy.stem.layout.params] == ["model.embed_tokens.weight"]
    assert anatomy.stem_in_tail is tied
    assert [e.name for e in anatomy.tail.layout.params] == ["model.norm.weight"] + ["lm_head.weight"] * (not tied)
    assert [u.index for u in anatomy.units] == [0, 1, 2, 3, 4]
    assert anatomy.layers[1].full_names["mlp.up_proj.weight"] == ("model.layers.1.mlp.up_proj.weight",)
    assert not any(unit.unused for unit in anatomy.units)


def test_sizes_count_what_the_layouts_hold() -> None:
    model = build(tiny(), precision=torch.bfloat16)
    sizes, anatomy = model.sizes, model.anatomy
    assert sizes.params_total == sum(p.numel() for p in model.meta_model.parameters())
    assert sizes.params_active == sizes.params_total
    assert sizes.hidden_bytes_per_token == 64
    assert sizes.layers[0].streamed_bytes == anatomy.layers[0].layout.nbytes
    assert sizes.layers[0].bf16_elems == anatomy.layers[0].layout.elems
    # Inputs of 7 matrices, of 2 norms, of the gate's product, of attention: 10 to 40 times the hidden states.
    assert 10 * 64 < sizes.saved_bytes_per_token < 40 * 64
    assert sizes.config_hash != build(tiny(hidden_act="gelu")).sizes.config_hash


def test_a_token_visits_only_some_experts() -> None:
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
    )
    sizes = build(config).sizes
    experts = 2 * 4 * 3 * 32 * 48
    assert sizes.params_total - sizes.params_active == experts * 3 // 4


def test_documents_of_a_micro_batch() -> None:
    ids = torch.zeros(2, 6, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    packed = Documents.of(MicroBatch(ids, ids, positions, None, 12, 10))
    assert packed.starts.tolist() == [0, 2, 6, 12]
    assert packed.longest == 6
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    padded = Documents.of(MicroBatch(ids, ids, None, mask, 10, 8))
    assert padded.starts.tolist() == [0, 4, 6, 12]
    single = Documents.of(MicroBatch(ids[:, :3], ids[:, :3], None, None, 6, 4))
    assert single.starts.tolist() == [0, 3, 6, 6]
    assert single.longest == 3


def test_the_kernels_definition_keeps_to_document_and_window() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    starts = torch.tensor([0, 3, 7, 7], dtype=torch.int32)

    def run(value: Tensor) -> Tensor:
        return varlen_by_mask(q, k, value, starts, starts, 4, 4, scale=None, window_size=(1, 0), enable_gqa=True)

    before = run(v)
    for changed in range(7):
        other = v.clone()
        other[changed] += 1
        moved = (run(other) - before).flatten(1).abs().amax(1) > 0
        document = range(0, 3) if changed < 3 else range(3, 7)
        assert moved.tolist() == [t in document and 0 <= t - changed <= 1 for t in range(7)]


def test_varlen_falls_back_where_masks_are_something_else() -> None:
    assert build(tiny(attention_dropout=0.0), attention=VARLEN).attention == VARLEN
    assert build(tiny(attention_dropout=0.1), attention=VARLEN).attention == "sdpa"  # the kernel has no dropout
    assert build(AutoConfig.for_model("gpt_oss", num_hidden_layers=2, hidden_size=32), attention=VARLEN).attention == (
        "eager"
    )


def test_chunked_bf16_head_agrees_with_one_chunk() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 16).bfloat16().requires_grad_(True)
    head = Head(lambda h: h @ weight.T, False, ("tail:w",), (weight,))
    hidden = torch.randn(2, 9, 16).bfloat16()
    labels = torch.randint(0, 32, (2, 9))
    labels[0, :6] = IGNORE
    labels[:, 0] = IGNORE
    batch = MicroBatch(labels, labels, None, None, 18, int((labels != IGNORE).sum()))
    found = []
    for chunk in (1000, 4):
        sums: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor, sums: dict[str, Tensor] = sums) -> None:
            sums[name] = sums.get(name, torch.zeros(())) + gradient.float()

        out = tail_loss(head, hidden=hidden, batch=batch, denominator=5, chunk=chunk, grad=True, accumulate=add)
        found.append((out.loss, out.hidden_grad, sums["tail:w"]))
    (loss, slope, total), (loss_c, slope_c, total_c) = found
    torch.testing.assert_close(loss, loss_c)
    torch.testing.assert_close(slope, slope_c, rtol=0.02, atol=0.01)
    torch.testing.assert_close(total, total_c, rtol=0.02, atol=0.05)
    assert slope_c is not None
    assert not slope_c[0, :5].any()  # no label, no gradient
