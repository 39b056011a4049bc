"""Groups of experts: what a layer is divided into, and what one group gives."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import megatrain.model.experts
from megatrain.model.anatomy_of import parts_of
from megatrain.model.experts import ExpertCall, ExpertGroups, Experts, NotGroupable, find_all
from megatrain.model.layout import FlatLayout, TensorSpec
from megatrain.model.skeleton import LayerList, find_layers

TOKENS, WIDTH, COUNT, CHOSEN = 33, 16, 5, 3


def mixtral(**changes: object) -> tuple[nn.Module, LayerList]:
    fields = {"hidden_size": WIDTH, "intermediate_size": 24, "num_local_experts": COUNT, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    config = AutoConfig.for_model("mixtral", **(fields | heads | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return model, find_layers(model, count=2)


def experts_of_first(model: nn.Module, found: LayerList) -> tuple[Experts, ExpertGroups]:
    parts = parts_of(model, found=found)
    first = find_all(found.layers, parts=parts.layers)[0]
    assert first is not None
    specs = [TensorSpec(n, tuple(t.shape), torch.float32, True) for n, t in parts.layers[0].tensors.items()]
    return first, ExpertGroups.of(first, layout=FlatLayout.of(specs), count=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_groups_give_adds_up(dtype: torch.dtype) -> None:
    model, found = mixtral()
    experts, groups = experts_of_first(model, found)
    assert [(s.start, s.stop) for s in groups.spans] == [(0, 3), (3, 5)]
    tensors = {n: found.layers[0].get_parameter(n).detach().to(dtype).normal_(0, 0.3) for n in experts.names}
    hidden = torch.randn(TOKENS, WIDTH).to(dtype)
    weights, chosen = torch.randn(TOKENS, COUNT).softmax(-1).to(dtype).topk(CHOSEN, -1)
    whole = experts.run(tensors, slice(0, COUNT), hidden, chosen, weights)
    parts = [
        experts.run({n: t[span] for n, t in tensors.items()}, span, hidden, chosen, weights) for span in groups.spans
    ]
    exact = _by_hand(tensors, hidden.float(), chosen, weights.float())
    rounding = torch.finfo(dtype).eps * 8 * float(exact.abs().max())
    assert float((sum(p.float() for p in parts) - exact).abs().max()) <= rounding
    assert float((whole.float() - exact).abs().max()) <= rounding
    assert all(bool(p.any()) for p in parts)


def _by_hand(tensors: dict[str, Tensor], hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    up, down = (t.float() for n, t in sorted(tensors.items(), key=lambda item: "down" in item[0]))
    out = torch.zeros_like(hidden)
    for t in range(len(hidden)):
        for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, value = (up[expert] @ hidden[t]).chunk(2)
            out[t] += weight * (down[expert] @ (nn.functional.silu(gate) * value))
    return out


def test_a_group_that_no_token_chose_gives_nothing_and_has_zero_gradients() -> None:
    model, found = mixtral()
    experts, groups = experts_of_first(model, found)
    span = groups.spans[1]
    tensors = {n: found.layers[0].get_parameter(n).detach()[span].requires_grad_() for n in experts.names}
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weights = torch.ones(TOKENS, 2, requires_grad=True)
    chosen = torch.tensor([[0, 2]]).expand(TOKENS, 2)
    out = experts.run(tensors, span, hidden, chosen, weights)
    grads = torch.autograd.grad(out, [hidden, weights, *tensors.values()], torch.ones_like(out))
    assert not any(bool(t.any()) for t in (out, *grads))
    assert not any(bool(t.isnan().any()) for t in (out, *grads))


def test_the_module_is_left_as_it_was() -> None:
    model, found = mixtral()
    experts, groups = experts_of_first(model, found)
    module: MixtralExperts = found.layers[0].mlp.experts
    before = dict(vars(module)), dict(module._parameters)
    tensors = {n: found.layers[0].get_parameter(n).detach()[:3] for n in experts.names}
    with pytest.raises(RuntimeError):
        experts.run(
            tensors, groups.spans[0], torch.randn(4, WIDTH + 1), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        )
    with experts.call.answering(lambda hidden, chosen, weights: hidden * 2):
        assert torch.equal(
            module(torch.ones(2, 3), top_k_index=torch.zeros(2, 1), top_k_weights=torch.zeros(2, 1)),
            torch.full((2, 3), 2.0),
        )
    assert (dict(vars(module)), dict(module._parameters)) == before


def test_what_is_left_of_a_layer_and_its_groups_make_up_the_layer() -> None:
    model, found = mixtral()
    experts, _ = experts_of_first(model, found)
    layout = FlatLayout.of(
        TensorSpec(n, tuple(p.shape), torch.bfloat16 if "proj" in n else torch.float32, True)
        for n, p in found.layers[0].named_parameters()
    )
    divided = ExpertGroups.of(experts, layout=layout, count=5)
    assert [(s.start, s.stop) for s in divided.spans] == [(0, 3), (3, 5)]  # none has one expert alone
    assert [e.name for e in divided.rest.params] == [e.name for e in layout.params if "experts" not in e.name]
    block = torch.arange(layout.nbytes).to(torch.uint8)
    rest = torch.cat([block[part] for part in layout.around(*experts.names)])
    assert len(rest) == divided.rest.nbytes
    whole = layout.views(block)
    assert all(
        torch.equal(view.view(torch.uint8), whole[n].view(torch.uint8)) for n, view in divided.rest.views(rest).items()
    )
    assert sum(e.numel for part in divided.layouts for e in part.params) == sum(
        layout.entry(n).numel for n in experts.names
    )


class Odd(MixtralExperts):
    """With a tensor that is not divided by expert."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(3))


def test_refusals() -> None:
    model, found = mixtral()
    found.layers[1].mlp.experts = Odd(model.config)
    with pytest.raises(NotGroupable, match="Odd holds tensors that are not divided by expert"):
        find_all(found.layers, parts=parts_of(model, found=found).layers)
    model, found = mixtral()
    found.layers[1].mlp.experts = found.layers[0].mlp.experts
    with pytest.raises(NotGroupable, match="MixtralExperts shares parameters"):
        find_all(found.layers, parts=parts_of(model, found=found).layers)
    _, found = mixtral()
    found.layers[1].mlp.more = MixtralExperts(model.config)
    with pytest.raises(NotGroupable, match="MixtralDecoderLayer has experts in 2 places"):
        find_all(found.layers, parts=parts_of(model, found=found).layers)
    _, found = mixtral()
    smaller = copy.deepcopy(model.config)
    smaller.intermediate_size = 8
    found.layers[1].mlp.experts = MixtralExperts(smaller)
    with pytest.raises(NotGroupable, match="different shapes"):
        find_all(found.layers, parts=parts_of(model, found=found).layers)
    model, found = mixtral()
    model.set_experts_implementation("eager")
    with pytest.raises(NotGroupable, match="MixtralExperts runs as 'eager'"):
        find_all(found.layers, parts=parts_of(model, found=found).layers)
    model, found = mixtral(num_local_experts=3)
    with pytest.raises(NotGroupable, match="MixtralExperts has no more than 3 experts"):
        find_all(found.layers, parts=parts_of(model, found=found).layers)


@pytest.mark.parametrize("release", ["5.10.4", "5.16.0", "5.17.0", "5.20.0.dev0"])
def test_biases_need_a_release_that_keeps_other_tokens_out_of_them(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = mixtral()
    for layer in found.layers:
        layer.mlp.experts.has_bias = True
    monkeypatch.setattr(megatrain.model.experts, "transformers", SimpleNamespace(__version__=release))
    if release in ("5.10.4", "5.16.0"):
        with pytest.raises(NotGroupable, match=f"MixtralExperts has biases: transformers {release} is too old, 5.17"):
            find_all(found.layers, parts=parts_of(model, found=found).layers)
    else:
        assert None not in find_all(found.layers, parts=parts_of(model, found=found).layers)


def test_experts_that_nobody_runs_are_no_result() -> None:
    _, found = mixtral()
    module = found.layers[0].mlp.experts
    call = ExpertCall(module)
    with pytest.raises(RuntimeError, match="nobody runs them"):
        call(torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
