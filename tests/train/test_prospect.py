"""What a resumed run is told of its plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.hardware import Limit
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


@pytest.mark.parametrize("change", [{"head_slices": -4}, {"head_slices": 1}, {"micro_batch": 9}, {"head_chunk": 0}])
def test_a_plan_that_no_planner_made_is_not_taken(change: dict[str, int]) -> None:
    _check_cut(PLAN, batch_size=8)
    with pytest.raises(ValueError, match="not a plan"):
        _check_cut(replace(PLAN, **change), batch_size=8)  # type: ignore[arg-type]
