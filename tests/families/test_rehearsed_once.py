"""Layers of one kind that are called alike are rehearsed once: what is found is what rehearsing each one finds."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from variants import DEFAULT, EAGER_ONLY, VARIANTS, config_of

from megatrain.errors import ModelError
from megatrain.model import trial
from megatrain.model.attention import VARLEN
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.stream.device import CpuRng

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
QUICK = ("smollm2-135m", "qwen2.5-7b")


def found_in(config: PretrainedConfig, *, attention: str) -> object:
    spec = ModelSpec(config=config, attention=attention, precision=torch.bfloat16, training=True, compile=False)
    try:
        model = StreamedModel.build(spec, rng=CpuRng())
    except ModelError as error:
        return str(error)
    seen = model._trial
    paths = [{id(m): path for path, m in layer.named_modules()} for layer in model._found.layers]
    attention_calls = sorted(
        (index, known[id(call.module)], *call[1:])
        for call in seen.attention_calls
        for index, known in enumerate(paths)
        if id(call.module) in known
    )
    return (
        model.sizes,
        model.attention,
        seen.forward_needs_grad,
        seen.unused_in_layers,
        seen.unread_in_layers,
        attention_calls,
    )


def check(config: PretrainedConfig, *, monkeypatch: pytest.MonkeyPatch, eager: bool = False) -> None:
    for attention in ("eager",) if eager else ("auto", VARLEN):
        once = found_in(config, attention=attention)
        with monkeypatch.context() as patch:
            numbers = count()
            patch.setattr(trial, "form_of", lambda call, numbers=numbers: next(numbers))
            each = found_in(config, attention=attention)
        assert once == each


@pytest.mark.parametrize("variant", DEFAULT)
def test_variant(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(variant), monkeypatch=monkeypatch, eager=variant in EAGER_ONLY)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in DEFAULT])
def test_every_other_variant(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(config_of(variant), monkeypatch=monkeypatch, eager=variant in EAGER_ONLY)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(path.name, marks=() if path.name in QUICK else pytest.mark.slow)
        for path in sorted(SHAPES.iterdir())
    ],
)
def test_shape(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(AutoConfig.from_pretrained(SHAPES / shape), monkeypatch=monkeypatch)


def test_layers_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """28 layers of one kind, two lengths: with the small windows, without, and without the MLP: six rehearsals."""
    ran: list[int] = []
    run = trial.Rehearsals.run
    monkeypatch.setattr(
        trial.Rehearsals, "run", lambda self, index, **rest: (ran.append(index), run(self, index, **rest))[1]
    )
    found_in(AutoConfig.from_pretrained(SHAPES / "qwen2.5-7b"), attention=VARLEN)
    assert ran == [0] * 6
