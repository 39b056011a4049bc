"""Calls of ``megatrain estimate-memory`` for the tests beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import estimate_command

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
RECIPES = Path(__file__).parents[2] / "recipes"
PARTS = ("host", "device", "disk")


def run(model: Path | None, *overrides: str, **options: Any) -> int:
    given: dict[str, Any] = {"model": None if model is None else str(model), "overrides": overrides, "json": True}
    given |= {"gpu": None, "vram": None, "host": None, "link": None, "cores": None, "largest": False}
    return estimate_command.run(options.pop("recipe", None), **given | options)


def estimated(capsys: pytest.CaptureFixture[str], model: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    code = run(model, *overrides, **options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["exit_code"] == code
    assert isinstance(found, dict)
    return found
