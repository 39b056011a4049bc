"""Shapes of public models that are shipped: right, complete, said to be used, and never trained from."""

from __future__ import annotations

import json
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.cli import estimate_command
from megatrain.errors import ModelError
from megatrain.model import hub
from megatrain.recipe import known_model, load_recipe, shipped_recipes
from megatrain.recipe.assets import known_models
from megatrain.train.model_config import read_config
from megatrain.train.structure import read_structure
from megatrain.train.ways import Ways

MILLIONS = {  # as the models' cards say
    "meta-llama/Llama-3.1-8B-Instruct": 8_030,
    "meta-llama/Llama-3.3-70B-Instruct": 70_554,
    "Qwen/Qwen2.5-7B-Instruct": 7_616,
    "Qwen/Qwen2.5-32B-Instruct": 32_764,
    "Qwen/Qwen3-14B": 14_768,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 135,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711,
}


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither models nor sizes, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *names, **options: None)
    monkeypatch.setattr(hub, "reachable", lambda: False)


def test_every_model_of_a_shipped_recipe_is_known() -> None:
    named = {load_recipe(name, overrides=[]).model.path for name in shipped_recipes()}
    assert {name for name in named if not name.startswith("megatrain:")} == set(known_models()) == set(MILLIONS)


@pytest.mark.parametrize("hub_id", MILLIONS)
def test_they_have_the_parameters_of_their_models(hub_id: str) -> None:
    config = AutoConfig.from_pretrained(known_model(hub_id))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[hub_id]


@pytest.mark.usefixtures("nothing_cached")
def test_a_shipped_recipe_is_estimated_without_the_hub_and_says_by_which_config(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options: dict[str, Any] = {"gpu": None, "model": None, "overrides": (), "link": None, "cores": 16, "largest": False}
    for _ in range(2):  # the second time from the sizes that were kept
        assert estimate_command.run("smollm2-135m", vram="24GiB", host="64GiB", json=True, **options) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["params"]["total"] == 134_515_008
        (said,) = (line for line in found["assumed"] if "as it is shipped with megatrain" in line)
        assert "HuggingFaceTB/SmolLM2-135M-Instruct" in said


@pytest.mark.usefixtures("nothing_cached")
def test_it_stands_for_no_other_revision() -> None:
    recipe = load_recipe("smollm2-135m", overrides=["model.revision=v0"])
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        read_structure(recipe, ways=Ways.of(recipe, on_cuda=False))


@pytest.mark.usefixtures("nothing_cached")
def test_training_never_takes_it() -> None:
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        read_config(load_recipe("smollm2-135m", overrides=[]))


def test_what_is_here_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    folder = tmp_path_factory.mktemp("hub")
    shape = known_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert shape is not None
    fewer = json.loads((shape / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(fewer))
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *names, **options: str(folder / "config.json")
    )
    recipe = load_recipe("smollm2-135m", overrides=[])
    found = read_structure(recipe, ways=Ways.of(recipe, on_cuda=False))
    assert len(found.facts.sizes.layers) == 3
    assert found.assumed is None
