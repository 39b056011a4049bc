from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.errors import RecipeError
from megatrain.recipe import is_asset, resolve_asset


def test_shipped_models_and_data() -> None:
    assert is_asset("megatrain:kjv-tiny")
    assert not is_asset("kjv-tiny")
    assert (resolve_asset("megatrain:kjv-tiny") / "config.json").is_file()
    assert resolve_asset("megatrain:devil.jsonl").is_file()
    assert resolve_asset("some/where.jsonl") == Path("some/where.jsonl")


@pytest.mark.parametrize("name", ["nothing", "", "../recipe", "NOTICE", "kjv-tiny/../devil.jsonl"])
def test_what_is_not_shipped(name: str) -> None:
    with pytest.raises(RecipeError, match="is not shipped"):
        resolve_asset(f"megatrain:{name}")


def test_the_room_knows_no_tensors() -> None:
    code = "import sys, megatrain.recipe, megatrain.units; print('torch' in sys.modules, 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
