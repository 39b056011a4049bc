"""MLPs in tiles of the sequence: which families have them so, and that numbers stay."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from drive import Streamed, make_batches, reference_model
from torch import Tensor, nn
from variants import VARIANTS, attention_of, config_of

from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.model.tiles import MlpTiles, _sees_one_token
from megatrain.model.unread import outputs_are_read

TILED = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox", "starcoder2", "olmo2", "granite", "glm4"]
RELATIVE = 2e-6
"""Of a gradient, to its own largest element: a tile's products sum in another order. 6e-7 measured."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(hidden)))


class Shifting(Mlp):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.roll(1, dims=1))


class Pooling(Mlp):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(1, keepdim=True))


class Cutting(Mlp):
    def forward(self, hidden: Tensor) -> Tensor:
        first, second = hidden.chunk(2, dim=1)
        return super().forward(torch.cat([second, first], dim=1))


@pytest.mark.parametrize(("kind", "sees"), [(Mlp, True), (Shifting, False), (Pooling, False), (Cutting, False)])
def test_a_module_is_told_from_one_that_mixes_tokens(kind: type[Mlp], sees: bool) -> None:
    with torch.device("meta"):
        assert _sees_one_token(kind()) is sees


@pytest.mark.parametrize("variant", TILED)
@pytest.mark.parametrize("tokens", [7, 16])
def test_a_step_gives_the_same_numbers(variant: str, tokens: int) -> None:
    config = config_of(variant)
    attention = attention_of(variant)
    streamed = Streamed(reference_model(config, attention=attention), config=config, attention=attention)
    batches = make_batches(2)
    plain = streamed.step(batches)
    streamed.model.tile_mlps(tokens)
    tiled = streamed.step(batches)
    calls = Counter(type(part.forward) for layer in streamed.model._found.layers for part in layer.modules())
    assert calls[MlpTiles] == config.num_hidden_layers
    assert float(tiled.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert tiled.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        gap = float((tiled.gradients[name] - gradient).abs().max())
        assert gap <= RELATIVE * max(float(gradient.abs().max()), 1e-3), name
    streamed.model.tile_mlps(0)
    assert torch.equal(streamed.step(batches).loss, plain.loss)


def test_a_row_no_longer_than_a_tile_runs_whole() -> None:
    config = config_of("llama")
    streamed = Streamed(reference_model(config, attention="sdpa"), config=config, attention="sdpa")
    batches = make_batches(1)
    plain = streamed.step(batches)
    streamed.model.tile_mlps(4096)
    tiled = streamed.step(batches)
    assert torch.equal(tiled.loss, plain.loss)
    assert all(torch.equal(tiled.gradients[name], plain.gradients[name]) for name in plain.gradients)


def test_of_a_tiled_mlp_only_its_input_is_kept_and_nothing_is_computed_before_the_backward() -> None:
    torch.manual_seed(0)
    mlp, hidden = Mlp(), torch.randn(1, 32, 8, requires_grad=True)
    expected = mlp(hidden)
    slope = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [hidden, *mlp.parameters()], slope)
    seen: list[int] = []
    mlp.up.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape[1]))
    mlp.forward = MlpTiles(mlp, unread=True, tokens=10)  # type: ignore[method-assign, assignment]
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        out = mlp(hidden)
    assert seen == []
    assert kept == [hidden.shape, *(p.shape for p in mlp.parameters())]
    found = torch.autograd.grad(out, [hidden, *mlp.parameters()], slope)
    assert seen == [10, 10, 10, 2]
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    with outputs_are_read():
        assert torch.allclose(mlp(hidden), expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_the_mlp_does_not_read_has_no_gradient() -> None:
    torch.manual_seed(0)
    mlp, hidden = Mlp(), torch.randn(1, 32, 8, requires_grad=True)
    mlp.spare = nn.Parameter(torch.ones(8))
    wanted = torch.autograd.grad(mlp(hidden).sum(), [hidden, *mlp.parameters()], allow_unused=True)
    mlp.forward = MlpTiles(mlp, unread=False, tokens=10)  # type: ignore[method-assign, assignment]
    found = torch.autograd.grad(mlp(hidden).sum(), [hidden, *mlp.parameters()], allow_unused=True)
    assert [g is None for g in found] == [g is None for g in wanted]
    assert sum(g is None for g in found) == 1
    for a, b in zip(found, wanted, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_families_that_cannot_have_tiles_are_left_whole() -> None:
    class NoRng:
        def get(self) -> object: ...

        def set(self, state: object) -> None: ...

    without = []
    for variant in ("mixtral", "gpt_oss", "qwen2_moe"):
        assert variant in VARIANTS
        spec = ModelSpec(config_of(variant), attention_of(variant), torch.float32, True, False)
        if StreamedModel.build(spec, rng=NoRng()).tiling is None:
            without.append(variant)
    assert without == ["mixtral", "gpt_oss", "qwen2_moe"]
