"""A layer's backward, compiled and not."""

from __future__ import annotations

from dataclasses import replace

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import attempt
from megatrain.plan.transient import COMPILED_KEPT, RECOMPUTE_FACTOR
from plan.jobs import GIB, HALF_B, SEVEN_B, job, limits

TOKENS = 8 * 2048
WIDE = replace(SEVEN_B, widest_bytes_per_token=37_888)


def plan(sizes: ModelSizes, *, compiled: bool, vram: int = 40 * GIB) -> MemoryPlan:
    return attempt(job(sizes, micro_batch=8, vram=vram, limits=limits(512 * GIB), compiled=compiled))


def backward(sizes: ModelSizes, *, compiled: bool) -> int:
    found = plan(sizes, compiled=compiled).device["one layer's backward or the head"]
    return found - max(unit.param_bytes for unit in sizes.layers)


def test_it_holds_six_tensors_of_the_widest_product_or_the_graph_and_two() -> None:
    assert backward(WIDE, compiled=True) == TOKENS * 6 * 37_888
    narrow = replace(WIDE, widest_bytes_per_token=20_000)
    assert backward(narrow, compiled=True) == int((COMPILED_KEPT * 232_456 + 2 * 20_000) * TOKENS)
    assert backward(WIDE, compiled=False) == int(RECOMPUTE_FACTOR * 232_456) * TOKENS


def test_layers_that_are_never_compiled_count_as_such() -> None:
    never = replace(WIDE, eager_layers=1)
    assert backward(never, compiled=True) == backward(WIDE, compiled=False)


def test_so_do_their_kept_graphs() -> None:
    never = replace(HALF_B, eager_layers=1)
    compiled, eager = (plan(sizes, compiled=True, vram=80 * GIB) for sizes in (HALF_B, never))
    assert compiled.kept > eager.kept > 0
    assert eager.device["kept graphs"] == eager.kept * 60_000 * 32 * 2048
    assert compiled.device["kept graphs"] == compiled.kept * int(COMPILED_KEPT * 60_000) * 32 * 2048
