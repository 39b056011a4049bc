"""Whole runs of a mixture of experts whose experts come in groups: interrupted, resumed, exported, out of memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from whole import assert_resumed_as_undisturbed, curve, session, train, weights, whole_recipe, write_rows

from megatrain.plan import cutting, memory
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.job import Job
from megatrain.recipe import Recipe, resolve_asset
from megatrain.stream.device import CpuDevice
from megatrain.train.manifest import read_manifest

GROUPS = 2
KEYS = ("step", "loss", "aux_loss", "grad_norm")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny mixture of experts, and the tokenizer of the shipped model."""
    folder = tmp_path_factory.mktemp("mixture")
    shipped = resolve_asset("megatrain:kjv-tiny")
    for file in (*shipped.glob("*token*"), *shipped.glob("*.jinja")):
        shutil.copy(file, folder)
    vocab = json.loads((shipped / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=48, num_local_experts=4, num_hidden_layers=2, vocab_size=vocab,
        num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.1, max_position_embeddings=128,
        output_router_logits=True,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def recipe_of(folder: Path, mixture: Path, **memory_section: Any) -> Recipe:
    rows = mixture / "rows.jsonl"
    if not rows.exists():
        write_rows(rows)
    # the shipped model's override of attention_dropout is this one's own config
    sections = {"model": {"path": str(mixture), "config": {}}, "train": {"epochs": 2, "batch_size": 4}}
    made = {"device": "cpu", "compile": "off", "micro_batch": 2, "threads": 2} | memory_section
    return whole_recipe(folder, rows=rows, memory=made, **sections)


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that has no room for a layer. A run that is resumed is planned as ever."""

    def attempt(job: Job) -> MemoryPlan:
        return cutting.attempt(job) if job.resumed else next(cutting.cuts(job, groups=GROUPS))

    monkeypatch.setattr(memory, "attempt", attempt)


def test_losses_and_weights_are_those_of_whole_layers(
    tmp_path: Path, mixture: Path, request: pytest.FixtureRequest
) -> None:
    train(recipe_of(tmp_path / "whole", mixture))
    request.getfixturevalue("in_groups")
    run = session(recipe_of(tmp_path / "groups", mixture))
    run.run()
    plan = read_manifest(max((tmp_path / "groups" / "checkpoints").glob("step-*"))).identity.plan
    assert plan["expert_groups"] == GROUPS
    whole, groups = (
        [number for line in curve(tmp_path / name, *KEYS) for number in line] for name in ("whole", "groups")
    )
    assert len(whole) == len(groups) >= 4 * 4
    assert groups == pytest.approx(whole, rel=1e-5)
    theirs, ours = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "groups"))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[n] - t).abs().mean()) for n, t in theirs.items()) < 1e-6
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "groups" / "model", output_loading_info=True)
    assert not any(info.values())
    assert model.config.num_local_experts == 4


def test_interrupted_and_resumed_is_bit_equal(tmp_path: Path, mixture: Path, in_groups: None) -> None:
    assert_resumed_as_undisturbed(lambda folder: recipe_of(folder, mixture), tmp_path, keys=KEYS)


SLOW = [pytest.param(what, marks=pytest.mark.slow) for what in ("route(", "mix(", "reroute(")]


@pytest.mark.parametrize("what", ["unmix(", *SLOW])
def test_out_of_memory_within_a_group_begins_the_step_again(
    tmp_path: Path, mixture: Path, in_groups: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    left = [1]

    def touch(device: CpuDevice, seen: str, **more: Any) -> None:
        if left and seen.startswith(what):
            left.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    train(recipe_of(tmp_path / "smaller", mixture, micro_batch=1))
    monkeypatch.setattr(CpuDevice, "touch", touch)
    run = session(recipe_of(tmp_path / "again", mixture))
    run.run()
    assert not left
    assert curve(tmp_path / "again", *KEYS) == curve(tmp_path / "smaller", *KEYS)
    assert weights(tmp_path / "again") == weights(tmp_path / "smaller")
