"""When the planner cuts the head into slices, and what that takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from jobs import GIB, SEVEN_B, TINY, job, limits, model

from megatrain.errors import DoesNotFit
from megatrain.model.sizes_types import ModelSizes, SliceSizes
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import WORTH_TOKENS, attempt, cuts
from megatrain.plan.explain import explain
from megatrain.plan.largest import scaled
from megatrain.plan.memory import decide
from megatrain.plan.rates import Rates
from megatrain.plan.speed import estimate


def sliceable(sizes: ModelSizes, *, vocab: int, hidden: int, itemsize: int = 2) -> ModelSizes:
    return replace(sizes, slicing=SliceSizes(vocab, hidden, vocab, hidden, itemsize, 0))


SEVEN = sliceable(SEVEN_B, vocab=152_064, hidden=3584)
EIGHT = sliceable(
    model(hidden=4096, layer=218_112_000, layers=32, vocab=128_256, saved=250_000), vocab=128_256, hidden=4096
)


def plan_of(sizes: ModelSizes, *, vram: int, batch: int = 8) -> MemoryPlan:
    return attempt(job(sizes, batch=batch, seq=1024, vram=vram * GIB, stem_shared=False))


@pytest.mark.parametrize(("sizes", "gib"), [(SEVEN, 6), (SEVEN, 8), (EIGHT, 7)])
def test_what_would_not_fit_fits_in_slices(sizes: ModelSizes, gib: int) -> None:
    whole = plan_of(replace(sizes, slicing=None), vram=gib)
    sliced = plan_of(sizes, vram=gib)
    assert not whole.fits
    assert sliced.fits
    assert sliced.head_slices >= 2
    assert sliced.resident == 0
    assert sliced.embedding_rows == 8 * 1024 + 1


def test_the_plan_says_that_slices_cost_a_product() -> None:
    asked = job(SEVEN, batch=8, seq=1024, vram=8 * GIB, stem_shared=False)
    sliced = explain(attempt(asked), job=asked)
    assert [s for s in sliced if "4 slices" in s and "one more product" in s]
    roomy = replace(asked, memory=replace(asked.memory, vram=24 * GIB))
    assert not [s for s in explain(attempt(roomy), job=roomy) if "slices" in s]


def test_memory_does_not_depend_on_the_vocabulary() -> None:
    """Twice the vocabulary, the same rows of a step: only the slices grow, and they can be more."""
    large = sliceable(
        model(hidden=3584, layer=233_057_792, layers=28, vocab=304_128, saved=232_456), vocab=304_128, hidden=3584
    )
    one, two = (replace(plan_of(s, vram=8), device_limit=None) for s in (SEVEN, large))
    same = ("weight slots", "stem and tail", "gradient buffers")
    assert {k: two.device[k] for k in same} == {k: one.device[k] for k in same}
    assert plan_of(large, vram=8).fits


@pytest.mark.parametrize(("gib", "batch"), [(12, 64), (24, 64), (10, 4)])
def test_where_there_is_room_the_head_stays_whole(gib: int, batch: int) -> None:
    assert plan_of(SEVEN, vram=gib, batch=batch) == plan_of(replace(SEVEN, slicing=None), vram=gib, batch=batch)


def test_slices_are_worth_a_micro_batch_twice_as_large() -> None:
    whole, sliced = plan_of(replace(SEVEN, slicing=None), vram=10, batch=64), plan_of(SEVEN, vram=10, batch=64)
    assert whole.fits
    assert whole.micro_batch * 1024 < WORTH_TOKENS
    assert sliced.micro_batch >= 2 * whole.micro_batch


def test_on_the_cpu_nothing_is_sliced() -> None:
    tiny = sliceable(TINY, vocab=2048, hidden=128, itemsize=4)
    assert attempt(job(tiny, limits=limits(64 * GIB, vram=None))).head_slices == 0


def test_a_resumed_run_keeps_its_slices_and_its_plan_survives_the_manifest() -> None:
    kept = plan_of(SEVEN, vram=8)
    assert MemoryPlan.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept
    old = {k: v for k, v in kept.to_dict().items() if k not in ("head_slices", "embedding_rows")}
    assert MemoryPlan.from_dict(old).head_slices == 0
    roomy = attempt(job(SEVEN, batch=8, seq=1024, vram=24 * GIB, stem_shared=False, resumed=kept))
    assert (roomy.head_slices, roomy.head_chunk) == (kept.head_slices, kept.head_chunk)


def test_a_resumed_run_whose_head_can_no_longer_be_sliced_has_it_whole() -> None:
    """Another version of its code, or another model in its folder: what is wrong is told where models are compared."""
    kept = plan_of(SEVEN, vram=8)
    whole = replace(SEVEN, slicing=None)
    for gib in (24, 3):
        assert attempt(job(whole, batch=8, seq=1024, vram=gib * GIB, stem_shared=False, resumed=kept)).head_slices == 0


@pytest.mark.parametrize("scale", [0.01, 0.25, 0.5, 2, 4])
def test_a_scaled_model_has_scaled_slices(scale: float) -> None:
    """Of stem and tail only the rows of a step are on the device, at every width."""
    sizes = scaled(SEVEN, scale)
    asked = job(sizes, batch=8, seq=1024, vram=1024 * GIB, stem_shared=False, micro_batch=1)
    *_, plan = cuts(asked, slices=16)
    rows = (8 * 1024 + 1) * 2 * 3584 * scale
    assert 0.99 * rows <= plan.device["stem and tail"] <= 1.01 * rows + sizes.vocab_size * 4 + 8192
    assert all(size >= 0 for size in plan.device.values())


def test_a_refusal_speaks_of_the_smallest_there_is() -> None:
    with pytest.raises(DoesNotFit) as caught:
        decide(job(SEVEN, batch=64, seq=1024, vram=3 * GIB, stem_shared=False))
    assert "3.00 GiB" in str(caught.value)
    least = attempt(job(SEVEN, batch=64, seq=1024, vram=3 * GIB, stem_shared=False))
    assert (least.fits, least.micro_batch, least.head_slices) == (False, 1, 16)


def test_the_second_product_with_the_head_is_part_of_the_estimate() -> None:
    rates = Rates("test", None, 5e14, 4e14, 3e12, 5e10, 5e10, 4e10, 1e11, 16, "test")
    plan = plan_of(SEVEN, vram=8)
    sliced, whole = (estimate(SEVEN, plan=p, rates=rates, tokens=8192) for p in (plan, replace(plan, head_slices=0)))
    head = 2 * 152_064 * 3584 * 8192 / 5e14
    assert sliced.head_s - whole.head_s == pytest.approx(head)
    assert sliced.link_out_s < whole.link_out_s  # the embedding's gradient goes home as rows
