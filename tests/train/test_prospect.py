"""What a resumed run is told of its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from whole import whole_recipe, write_rows

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.hardware import Limit
from megatrain.train import planning
from megatrain.train.model_config import read_config
from megatrain.train.prospect import _check_cut, new_rounding

PLAN = MemoryPlan(
    2, 2, 64, 2, 2, "device", 0, 1024, 512, 1, {}, {}, Limit(1 << 30, "test"), None, on_cpu=True, head_slices=4
)


def test_only_what_decides_rounding_is_told() -> None:
    assert new_rounding(PLAN, now=replace(PLAN, slots=3, activations="host", resident=1, threads=9)) is None
    said = new_rounding(PLAN, now=replace(PLAN, micro_batch=1, head_slices=0))
    assert said is not None
    assert "micro-batches of 1 rows (were 2), 0 slices of the head (were 4);" in said
    assert "logits" not in said


@pytest.mark.parametrize(
    "change", [{"head_slices": -4}, {"head_slices": 1}, {"expert_groups": -1}, {"micro_batch": 9}, {"head_chunk": 0}]
)
def test_a_plan_that_no_planner_made_is_not_taken(change: dict[str, int]) -> None:
    _check_cut(PLAN, batch_size=8)
    with pytest.raises(ValueError, match="not a plan"):
        _check_cut(replace(PLAN, **change), batch_size=8)  # type: ignore[arg-type]


def test_where_the_cut_of_before_has_no_room_another_is_planned_on_the_device_that_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened twice, a GPU's context would count as what others hold, and not as ours."""
    opened: list[str] = []
    open_device = planning._open_device

    def counted(recipe: Any) -> Any:
        opened.append(recipe.memory.device)
        return open_device(recipe)

    def recipe(**memory: Any) -> Any:
        settings = {"device": "cpu", "compile": "off", "threads": 2, "micro_batch": "auto"} | memory
        data = {"max_seq_len": 256}
        rows = write_rows(tmp_path / "rows.jsonl")
        return whole_recipe(tmp_path / "run", rows=rows, memory=settings, data=data, train={"batch_size": 64})

    monkeypatch.setattr(planning, "_open_device", counted)
    config = read_config(recipe())
    large, small = (planning.plan_run(recipe(micro_batch=n, host=8 << 30), config=config).plan for n in (64, 1))
    host = (large.host_total + small.host_total) // 2
    opened.clear()
    planned = planning.plan_run(recipe(host=host), config=config, resumed=large)
    assert opened == ["cpu"]
    assert planned.plan.micro_batch < large.micro_batch
    assert planned.job.resumed is None
    kept = planning.plan_run(recipe(), config=config, resumed=small)
    assert (kept.plan.micro_batch, kept.job.resumed) == (1, small)
