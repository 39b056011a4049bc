"""Which heads can be cut into slices and which embeddings given as rows: found on Hugging Face's code by trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, PhiConfig, PretrainedConfig

from megatrain.model.skeleton import ModelSpec
from megatrain.model.sliced_tail import fused_running, fused_slope, running, slope_of_slice
from megatrain.model.streamed import StreamedModel
from megatrain.stream.device import CpuRng

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def build(config: PretrainedConfig, *, training: bool = True) -> StreamedModel:
    return StreamedModel.build(ModelSpec(config, "auto", torch.float32, training, False), rng=CpuRng())


def test_where_slices_and_rows_are_put() -> None:
    plain = build(LlamaConfig(**TINY, pad_token_id=5)).slicing
    assert plain is not None
    assert (plain.head.name, plain.head.rows, plain.head.width) == ("lm_head.weight", 64, 16)
    assert (plain.embedding.name, plain.bias, plain.tied, plain.padding) == (
        "model.embed_tokens.weight",
        None,
        False,
        5,
    )
    tied = build(Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=3.0)).slicing
    assert tied is not None
    assert tied.tied
    assert tied.head.name == tied.embedding.name == "model.embed_tokens.weight"
    biased = build(PhiConfig(**TINY)).slicing
    assert biased is not None
    assert biased.bias is not None
    assert biased.bias.name == "lm_head.bias"


def scaled(model: Any, logits: Tensor) -> Tensor:
    return torch.tanh(logits / 7) * 3 + 1


def normalised(model: Any, logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def one_token_forbidden(model: Any, logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits[..., 3] = -1e4
    return logits


def a_scale_for_each_token(model: Any, logits: Tensor) -> Tensor:
    return logits * torch.linspace(1, 2, 64)


def shortened(model: Any, logits: Tensor) -> Tensor:
    return logits[..., :60]


def with_the_mean_row(model: Any, logits: Tensor) -> Tensor:
    return logits + model.lm_head.weight.mean()


@pytest.mark.parametrize(
    ("after", "possible"),
    [
        (scaled, True),
        (normalised, False),
        (one_token_forbidden, False),
        (a_scale_for_each_token, False),
        (shortened, False),
        (with_the_mean_row, False),
    ],
)
def test_what_follows_the_head_must_be_elementwise(
    monkeypatch: pytest.MonkeyPatch, after: Callable[[Any, Tensor], Tensor], *, possible: bool
) -> None:
    original = LlamaForCausalLM.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        out.logits = after(self, out.logits)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert (build(LlamaConfig(**TINY)).slicing is not None) is possible


def test_a_head_that_draws_random_numbers_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, config: LlamaConfig) -> None:
        original(self, config)
        self.lm_head.register_forward_pre_hook(lambda module, args: (dropout(args[0]),))
        self.dropout = dropout

    dropout = nn.Dropout(0.5)
    original = LlamaForCausalLM.__init__
    monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
    assert build(LlamaConfig(**TINY)).slicing is None


def test_an_embedding_that_is_more_than_a_look_up_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(self: nn.Embedding, ids: Tensor) -> Tensor:
        return original(self, (ids + 1) % 64)

    original = nn.Embedding.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", shifted)
        assert build(LlamaConfig(**TINY)).slicing is None

    def centred(self: nn.Embedding, ids: Tensor) -> Tensor:
        return original(self, ids) - self.weight.mean(0)

    monkeypatch.setattr(nn.Embedding, "forward", centred)
    assert build(LlamaConfig(**TINY)).slicing is None


def test_the_numbers_of_slices_are_those_of_the_whole() -> None:
    """fp64 logits of the whole vocabulary against fp32 numbers of three slices, plain and as the compiler gets them."""
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn(9, 50, generator=generator)).to(torch.bfloat16)
    targets = torch.randint(0, 50, (9, 1), generator=generator)
    exact = logits.double()
    share = torch.full((1, 1), 0.25)
    onehot = torch.zeros(9, 50, dtype=torch.float64).scatter_(1, targets, 1.0)
    for measure, slope in ((running, slope_of_slice), (fused_running, fused_slope)):
        numbers = (torch.full((9, 1), -torch.inf), torch.zeros(9, 1), torch.zeros(9, 1))
        cuts = [slice(0, 20), slice(20, 40), slice(40, 50)]
        for cut in cuts:
            numbers = measure(logits[:, cut], *numbers, targets - cut.start)
        most, total, picked = numbers
        torch.testing.assert_close(most.double() + total.double().log(), exact.logsumexp(-1, keepdim=True))
        assert torch.equal(picked.double(), exact.gather(1, targets))
        slopes = [slope(logits[:, cut].float(), most, total, targets - cut.start, share) for cut in cuts]
        expected = (exact.softmax(-1) - onehot) * 0.25
        torch.testing.assert_close(torch.cat(slopes, -1).double(), expected, rtol=1e-5, atol=1e-9)
