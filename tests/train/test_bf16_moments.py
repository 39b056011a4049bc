"""`optimizer.state: bf16` in whole runs: what is stored, that a resume is exact, that it is not mixed with fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from whole import curve, session, state, train, weights, whole_recipe, write_rows

from megatrain.errors import RecipeError
from megatrain.plan.accounting import checkpoint_bytes
from megatrain.recipe import Recipe
from megatrain.report.events import StepReport
from megatrain.train.build import build_rooms
from megatrain.train.export import export_checkpoint
from megatrain.train.model_config import read_config
from megatrain.train.planning import plan_run
from megatrain.train.signals import Interrupted, StopFlag

STEPS = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


def recipe_of(folder: Path, rows: Path, *, moments: str = "bf16", **train: Any) -> Recipe:
    settings = {"epochs": None, "steps": STEPS} | train
    return whole_recipe(folder, rows=rows, train=settings, optimizer={"lr": 1e-3, "state": moments})


def stop_after(step: int) -> Any:
    def on_event(event: Any, stop: StopFlag) -> None:
        if isinstance(event, StepReport) and event.step == step:
            stop.request(15)

    return on_event


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_eight_steps_are_four_and_four(tmp_path: Path, rows: Path, precision: str) -> None:
    """Losses, weights and every byte of the state."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(recipe_of(whole, rows, precision=precision))
    recipe = recipe_of(parts, rows, precision=precision)
    with pytest.raises(Interrupted):
        train(recipe, on_event=stop_after(STEPS // 2))
    train(recipe, resume="auto")
    keys = ("step", "loss", "grad_norm")
    assert len(curve(whole, "step")) == STEPS
    assert curve(parts, *keys) == curve(whole, *keys)
    assert weights(parts) == weights(whole)
    assert state(parts) == state(whole)


def test_another_seed_rounds_the_moments_otherwise(tmp_path: Path, rows: Path) -> None:
    """The order of the rows is fixed and nothing is dropped, so only rounding is left to differ; fp32 has none."""
    curves: dict[tuple[str, int], list[Any]] = {}
    for moments in ("bf16", "fp32"):
        for seed in (0, 1):
            folder = tmp_path / f"{moments}-{seed}"
            recipe = whole_recipe(
                folder, rows=rows, model={"config": {}}, data={"train": str(rows), "max_seq_len": 64, "shuffle": False},
                train={"epochs": None, "steps": 3, "seed": seed, "batch_size": 4},
                optimizer={"lr": 1e-3, "state": moments},
            )  # fmt: skip
            train(recipe)
            curves[moments, seed] = curve(folder, "loss")
    assert curves["fp32", 0] == curves["fp32", 1]
    assert curves["bf16", 0] != curves["bf16", 1]
    assert curves["bf16", 0][0] == curves["fp32", 0][0]  # the first loss is of untouched weights


@pytest.mark.parametrize(("before", "now"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_moments_of_another_width_are_refused_by_name(tmp_path: Path, rows: Path, before: str, now: str) -> None:
    with pytest.raises(Interrupted):
        train(recipe_of(tmp_path / "run", rows, moments=before), on_event=stop_after(1))
    kept = state(tmp_path / "run")
    with pytest.raises(RecipeError, match=r"optimizer\.state changed since step-000001"):
        train(recipe_of(tmp_path / "run", rows, moments=now), resume="auto")
    assert state(tmp_path / "run") == kept


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plan_counts_what_is_allocated_and_written(tmp_path: Path, rows: Path, precision: str) -> None:
    recipe = recipe_of(tmp_path / "run", rows, precision=precision, steps=1)
    planned = plan_run(recipe, config=read_config(recipe))
    rooms = build_rooms(planned, fill=lambda store: None)
    store = rooms.store
    moments = sum(t.nbytes for unit in store.units for t in (unit.exp_avg, unit.exp_avg_sq))
    elems = sum(unit.unit.layout.elems for unit in store.units)
    assert planned.plan.host["optimizer moments"] == moments == 4 * elems
    wide = plan_run(recipe_of(tmp_path / "run", rows, moments="fp32", precision=precision), config=planned.config)
    assert wide.plan.host["optimizer moments"] == 8 * elems
    rooms.worker.close()
    store.close()

    train(recipe)
    written = max((tmp_path / "run" / "checkpoints").iterdir())
    tensors = 0
    for file in written.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            assert stored["exp_avg"].dtype is stored["exp_avg_sq"].dtype is torch.bfloat16
            tensors += sum(tensor.nbytes for tensor in stored.values())
    assert checkpoint_bytes(planned.model.sizes, moment_bytes=2) == tensors


def test_a_checkpoint_with_bf16_moments_exports_to_what_the_run_exported(tmp_path: Path, rows: Path) -> None:
    recipe = recipe_of(tmp_path / "run", rows, steps=2)
    working = session(recipe)
    working.run()
    export_checkpoint(
        tmp_path / "run", out=tmp_path / "out", dtype="auto", console=working._console, check=lambda: None
    )
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights(tmp_path / "run")


@pytest.mark.slow
def test_bf16_moments_learn_as_fp32_ones(tmp_path: Path) -> None:
    """Fifty steps of the quickstart's model and data: the held-out loss ends where it does with fp32 moments."""
    ends = {}
    for moments in ("fp32", "bf16"):
        recipe = whole_recipe(
            tmp_path / moments, rows=Path("megatrain:devil.jsonl"), model={"config": {}},
            data={"train": "megatrain:devil.jsonl", "eval_fraction": 0.05, "max_seq_len": 128},
            train={"epochs": None, "steps": 50, "batch_size": 8}, optimizer={"lr": 1e-3, "state": moments},
        )  # fmt: skip
        report = train(recipe)
        assert report.first_eval_loss is not None
        assert report.eval_loss is not None
        ends[moments] = report.eval_loss
        assert report.eval_loss < report.first_eval_loss - 1
    assert abs(ends["bf16"] - ends["fp32"]) < 0.001, ends  # 0.00002 was seen
