"""Every family with experts: in groups it gives what it gives whole, or it says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drive import Result, Streamed, differences, make_batches, reference_model, run_reference
from torch import Tensor
from variants import VARIANTS, attention_of, config_of

from megatrain.model import attention, kept_attention
from megatrain.model.attention import VARLEN
from megatrain.model.experts import NotGroupable

GROUPABLE = (
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe",
    "granitemoeshared", "phimoe", "dots1", "ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe", "qwen3_next",
    "qwen3_5_moe_text", "jamba", "granitemoehybrid", "lfm2_moe", "minimax",
)  # fmt: skip
READS = "the backward of a layer reads what its experts gave"
REFUSED = {
    "flex_olmo": READS,
    "afmoe": READS,
    "llama4_text": "Llama4TextExperts is none of the fused experts of transformers",
    "jetmoe": "JetMoeParallelExperts is none of the fused experts of transformers",
    "llama": "no layer has experts",
    "dbrx": "no layer has experts",  # whose matrices are stacked into flat ones, by a module of their own
}
DEFAULT = ("mixtral", "deepseek_v3")
"""Plain; dense layers, shared experts and chosen groups. (Biases and other dimensions: test_streamed_experts.py.)"""
RELATIVE = 5e-6
"""Of a tensor's largest difference, to its own largest element; 2e-6 measured. Why: see test_streamed_experts.py."""
CANCELLED = 0.01
"""Of the largest gradient: one below that is compared with this instead. Decays of linear attention (qwen3_next,
qwen3_5_moe_text) are sums of 1e-2 that cancel to 1e-6, and as rough as their terms."""
COUNTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
CHOICES = ("moe_k", "moe_topk", "num_experts_per_tok")


def beyond(ours: Result, theirs: Result) -> dict[str, float]:
    """Tensors that differ by more than rounding."""
    found = {}
    least = CANCELLED * max(float(t.abs().max()) for t in theirs.gradients.values())
    for name, difference in differences(ours, theirs).items():
        tensor = theirs.gradients.get(name)
        largest = float(theirs.loss) if tensor is None else max(least, float(tensor.abs().max()))
        if difference > RELATIVE * largest:
            found[name] = difference / largest
    return found


def grouped_against_whole(variant: str) -> None:
    """Four experts in two groups, eight in four, five in two; two or three choices a token."""
    fields = VARIANTS[variant]
    count, choice = (next(k for k in keys if k in fields or k == keys[-1]) for keys in (COUNTS, CHOICES))
    single = {"n_group": 1, "topk_group": 1} if "n_group" in fields else {}  # choices are then free
    for groups, overrides in ((2, {}), (4, {count: 8}), (3, {count: 5, choice: 3} | single)):
        config, attention = config_of(variant, **overrides), attention_of(variant)
        model = reference_model(config, attention=attention)
        batches = make_batches(2, packed=groups == 2 and variant in DEFAULT)
        streamed = Streamed(model, config=config, attention=attention, groups=groups)
        assert {len(g.spans) for g in streamed.groups if g is not None} == {min(groups, 2 if groups == 3 else 4)}
        ours = streamed.step(batches)
        assert beyond(ours, run_reference(model, batches)) == {}, groups
        if groups == 2:
            whole = Streamed(model, config=config, attention=attention)
            assert torch.equal(streamed.evaluate(batches[0])[0], whole.evaluate(batches[0])[0])


@pytest.mark.parametrize("variant", DEFAULT)
def test_family_in_groups(variant: str) -> None:
    grouped_against_whole(variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in GROUPABLE if v not in DEFAULT])
def test_every_other_family_in_groups(variant: str) -> None:
    grouped_against_whole(variant)


@pytest.mark.parametrize("variant", REFUSED)
def test_others_are_refused_by_name_and_run_whole(variant: str) -> None:
    config, attention = config_of(variant), attention_of(variant)
    model = reference_model(config, attention=attention)
    whole = Streamed(model, config=config, attention=attention)
    assert isinstance(whole.model.grouping, NotGroupable)
    assert REFUSED[variant] in str(whole.model.grouping)
    assert whole.model.sizes.experts is None
    with pytest.raises(NotGroupable):
        whole.model.divide_experts(2)
    batches = make_batches(1)
    assert differences(whole.step(batches), run_reference(model, batches)) == {}


DRAWS = {"mixtral": {"attention_dropout": 0.2, "router_jitter_noise": 0.1}, "qwen3_moe": {"attention_dropout": 0.2}}


@pytest.mark.parametrize("variant", DRAWS)
def test_what_is_run_twice_drops_the_same(variant: str) -> None:
    """One micro-batch: the layer up to its experts, and again, draw what the layer in one piece draws."""
    config, attention = config_of(variant, **DRAWS[variant]), attention_of(variant)
    model = reference_model(config, attention=attention, training=True)
    batches, found = make_batches(1), []
    for groups in (0, 2):
        torch.manual_seed(3)
        one = Streamed(model, config=config, attention=attention, training=True, groups=groups)
        assert one.model.stochastic
        torch.manual_seed(4)
        found.append(one.step(batches))
    assert beyond(found[1], found[0]) == {}
    torch.manual_seed(5)
    assert beyond(one.step(batches), found[0])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_our_own_attention_runs_once_each_way(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way to the experts; what it gave is used on the way on, with the bits of a second run."""
    config = config_of("mixtral")
    model, batches = reference_model(config, attention="sdpa"), make_batches(2, packed=packed)
    whole, grouped = (Streamed(model, config=config, attention=VARLEN, groups=groups) for groups in (0, 2))
    assert grouped.model.attention == VARLEN
    expected = whole.step(batches)
    ran: list[str] = []
    kept, attend = attention.attention_kept, kept_attention.attend

    def look(*states: Tensor, **settings: Any) -> Tensor | None:
        known = kept(*states, **settings)
        ran.extend(["as ever"] if known is None else [])
        return known

    monkeypatch.setattr(attention, "attention_kept", look)
    monkeypatch.setattr(kept_attention, "attend", lambda *states: ran.append("noted") or attend(*states))
    found = grouped.step(batches)
    assert ran == ["noted"] * (2 * len(batches) * config.num_hidden_layers)
    assert torch.equal(found.loss, expected.loss)
    others = [n for n in expected.gradients if ".experts." not in n]
    assert all(torch.equal(found.gradients[n], expected.gradients[n]) for n in others)
    assert beyond(found, expected) == {}
