"""A dry run ends as the run would where the headers of the weights tell it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from whole import session, whole_recipe, write_rows

from megatrain.errors import ModelError
from megatrain.recipe import resolve_asset

NORM = "model.norm.weight"
Change = Callable[[dict[str, Tensor]], None]


def lacks(tensors: dict[str, Tensor]) -> None:
    del tensors[NORM]


def more(tensors: dict[str, Tensor]) -> None:
    tensors["foo.bar"] = torch.zeros(2)


def misshapen(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = torch.ones(5)


def quantised(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = tensors[NORM].to(torch.int8)


def untied(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacks, "lacks model.norm.weight"),
        (more, "does not know: foo.bar"),
        (misshapen, r"another shape: model.norm.weight \(5,\) instead of"),
        (quantised, "quantised"),
        (untied, "different values for them"),
    ],
)
def test_a_dry_run_refuses_weights_that_do_not_fit_the_model(tmp_path: Path, change: Change, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_asset("megatrain:kjv-tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rows = write_rows(tmp_path / "rows.jsonl")
    recipe = whole_recipe(tmp_path / "run", rows=rows, model={"path": str(folder)})
    for action in ("dry_run", "run"):
        with pytest.raises(ModelError, match=message):
            getattr(session(recipe), action)()
