"""What the model room does not understand it refuses, by name and before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from megatrain.errors import ModelError
from megatrain.model.skeleton import REFUSED, ModelSpec, load_config
from megatrain.model.streamed import StreamedModel


class NoRng:
    def get(self) -> object:
        return None

    def set(self, state: Any) -> None:
        raise AssertionError("no dropout here")


def tiny(**overrides: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**(sizes | overrides))


def spec_of(config: Any) -> ModelSpec:
    return ModelSpec(config, "sdpa", torch.float32, training=False, compile=False)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_known_types_are_refused_by_name(name: str) -> None:
    config = tiny()
    config.model_type = name
    with pytest.raises(ModelError, match=name):
        StreamedModel.build(spec_of(config), rng=NoRng())


@pytest.mark.parametrize(("name", "reason"), [("t5", "encoder-decoder"), ("llava", "composite")])
def test_other_architectures_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        StreamedModel.build(spec_of(AutoConfig.for_model(name)), rng=NoRng())


def _patched(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    """Make Llama's loop over its layers `forward(layers, hidden)`, everything else as it is."""
    original = nn.ModuleList.__getitem__

    class Loop:
        def __init__(self, layers: nn.ModuleList) -> None:
            self.layers = layers

        def __iter__(self) -> Any:
            return iter([lambda h, **kw: forward(self.layers, h, kw)])

    def getitem(self: nn.ModuleList, index: Any) -> Any:
        return Loop(self) if isinstance(index, slice) else original(self, index)

    monkeypatch.setattr(nn.ModuleList, "__getitem__", getitem)


def _looped(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    for _ in range(2):
        for layer in layers:
            hidden = layer(hidden, **kwargs)
    return hidden


def _glued(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    for layer in layers:
        hidden = layer(hidden * 2, **kwargs)
    return hidden


def _remembering(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    earlier = hidden
    for layer in layers:
        hidden, earlier = layer(hidden, **(kwargs | {"earlier": earlier})), hidden
    return hidden


def _choosing(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, **(kwargs | {"chosen": hidden.sum(-1).round().to(torch.int64)}))
    return hidden


class _Opaque:
    pass


def _opaque(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    box = _Opaque()
    for layer in layers:
        hidden = layer(hidden, **(kwargs | {"box": box}))
    return hidden


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (_looped, "a loop"),
        (_glued, "is not the output of layer 0"),
        (_remembering, "computed from an earlier layer's output"),
        (_choosing, "follows the output of earlier layers"),
        (_opaque, "is a _Opaque, which could carry state"),
    ],
)
def test_forwards_that_a_replay_would_lose(monkeypatch: pytest.MonkeyPatch, loop: Any, reason: str) -> None:
    _patched(monkeypatch, loop)
    with pytest.raises(ModelError, match=reason):
        StreamedModel.build(spec_of(tiny()), rng=NoRng())


def test_a_second_output_threaded_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def threaded(layers: nn.ModuleList, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        state = None
        for layer in layers:
            hidden, state = layer(hidden, **(kwargs | {"state": state}))
        return hidden

    _patched(monkeypatch, threaded)
    with pytest.raises(ModelError, match="a second output of layer 0 feeds layer 1"):
        StreamedModel.build(spec_of(tiny()), rng=NoRng())


def test_config_folders(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    options: dict[str, Any] = {"revision": "main", "trust_remote_code": False}
    with pytest.raises(ModelError, match="there is no such folder"):
        load_config(str(tmp_path / "missing"), overrides={}, **options)
    config = load_config(str(tmp_path), overrides={"rope_theta": 5.0, "num_hidden_layers": 2}, **options)
    assert config.num_hidden_layers == 2
    assert config.rope_parameters["rope_theta"] == 5.0
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = load_config(str(tmp_path), overrides={"rope_scaling": scaling}, **options)
    assert config.rope_parameters == {"rope_theta": 10000.0} | scaling
    with pytest.raises(ModelError, match="no key 'layers'"):
        load_config(str(tmp_path), overrides={"layers": 2}, **options)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(str(tmp_path), overrides={}, **options)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(str(tmp_path), overrides={}, **options)


def test_the_given_config_is_not_changed() -> None:
    config = tiny(output_router_logits=False)
    before = config.to_json_string()
    model = StreamedModel.build(spec_of(config), rng=NoRng())
    assert config.to_json_string() == before
    assert isinstance(model.meta_model, LlamaForCausalLM)
    assert all(p.is_meta for p in model.meta_model.parameters())


@pytest.mark.parametrize(
    "overrides",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "32"},
        {"rope_scaling": "none"},
        {"hidden_act": "none"},
        {"hidden_size": -32},
    ],
)
@pytest.mark.parametrize("where", ["file", "recipe"])
def test_values_that_transformers_cannot_use_are_refused(tmp_path: Path, where: str, overrides: dict[str, Any]) -> None:
    written = tiny(head_dim=8).to_dict() | (overrides if where == "file" else {})
    (tmp_path / "config.json").write_text(json.dumps(written))
    changed = overrides if where == "recipe" else {}
    with pytest.raises(ModelError, match=" "):
        _load_and_build(tmp_path, overrides=changed)


def _load_and_build(folder: Path, *, overrides: dict[str, Any]) -> None:
    config = load_config(str(folder), revision="main", overrides=overrides, trust_remote_code=False)
    StreamedModel.build(spec_of(config), rng=NoRng())
