"""When the planner has experts come in groups, and what that takes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from jobs import GIB, SEVEN_B, job, limits, model, unit

from megatrain.errors import DoesNotFit
from megatrain.model.experts import spans_of
from megatrain.model.sizes_types import ExpertSizes, ModelSizes, SliceSizes
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import GROUPS_GAIN, attempt, cuts
from megatrain.plan.experts import GroupedExperts
from megatrain.plan.explain import explain
from megatrain.plan.job import Job
from megatrain.plan.largest import scaled
from megatrain.plan.memory import decide
from megatrain.plan.rates import Rates, assumed_rates
from megatrain.plan.speed import estimate


def mixture(
    *, hidden: int, wide: int, experts: int, chosen: int, rest: int, layers: int, vocab: int, dense: int = 0
) -> ModelSizes:
    """Autograd keeps what it keeps of a Mixtral layer, by hidden size and width. dense: layers without experts."""
    elems = (2 * wide * hidden, wide * hidden)
    kept = (23 * hidden, chosen * 2 * (6 * hidden + 7 * wide // 2))
    whole = model(
        hidden=hidden, layer=rest + experts * sum(elems), layers=layers, vocab=vocab, saved=sum(kept)
    )  # fmt: skip
    left = tuple(unit(f"layer {i}", rest) for i in range(layers))
    return replace(
        whole,
        layers=(*left[:dense], *whole.layers[dense:]),
        slicing=SliceSizes(vocab, hidden, vocab, hidden, 2, 0),
        experts=ExpertSizes(experts, chosen, elems, (2, 2), left, *kept),
    )


MIXTRAL = mixture(
    hidden=4096, wide=14336, experts=8, chosen=2, rest=41_984_000, layers=32, vocab=32_000
)  # fmt: skip
DEEPSEEK = mixture(
    hidden=7168, wide=2048, experts=256, chosen=8, rest=233_000_000, layers=61, vocab=129_280, dense=3
)  # fmt: skip


def asked(sizes: ModelSizes, *, vram: int, batch: int = 16, **changes: Any) -> Job:
    host = limits(20_000 * GIB)
    return job(sizes, batch=batch, seq=2048, vram=vram * GIB, stem_shared=False, **{"limits": host, **changes})


def plan_of(sizes: ModelSizes, *, vram: int, batch: int = 16, **changes: Any) -> MemoryPlan:
    return attempt(asked(sizes, vram=vram, batch=batch, **changes))


def test_the_shape_is_that_of_mixtral() -> None:
    assert MIXTRAL.layers[0].streamed_bytes == pytest.approx(2.9e9, rel=0.01)
    assert sum(u.elems for u in (MIXTRAL.stem, *MIXTRAL.layers, MIXTRAL.tail)) == pytest.approx(46.7e9, rel=0.01)


@pytest.mark.parametrize(("sizes", "gib"), [(MIXTRAL, 10), (MIXTRAL, 16), (DEEPSEEK, 16), (DEEPSEEK, 24)])
def test_what_would_not_fit_fits_in_groups(sizes: ModelSizes, gib: int) -> None:
    whole = plan_of(replace(sizes, experts=None), vram=gib)
    grouped = plan_of(sizes, vram=gib)
    assert not whole.fits
    assert grouped.fits
    assert grouped.expert_groups >= 2
    assert (grouped.resident, grouped.kept) == (0, 0)
    fewer = [plan for plan in cuts(asked(sizes, vram=gib), groups=grouped.expert_groups // 2) if plan.fits]
    assert all(GROUPS_GAIN * plan.micro_batch <= grouped.micro_batch for plan in fewer)


def test_where_whole_layers_fit_they_stay_whole() -> None:
    for gib in (24, 80):
        plan = plan_of(MIXTRAL, vram=gib)
        assert plan.fits
        assert (plan.expert_groups, plan.head_slices) == (0, 0)


@pytest.mark.parametrize(("batch", "seq"), [(64, 1024), (8, 4096), (16, 2048)])
def test_more_memory_makes_no_slower_plan(batch: int, seq: int) -> None:
    """From the least there is to where whole layers fit, in quarters of a GiB. A tenth: the rules are coarse."""
    rates, best = assumed_rates("NVIDIA H200", cores=14), float("inf")
    for quarters in range(30, 120):
        wanted = job(MIXTRAL, batch=batch, seq=seq, vram=quarters * GIB // 4, limits=limits(3000 * GIB))
        plan = attempt(replace(wanted, stem_shared=False))
        if plan.fits:
            step_s = estimate(MIXTRAL, plan=plan, rates=rates, tokens=batch * seq).step_s
            assert step_s <= 1.1 * best, quarters / 4
            best = min(best, step_s)
    assert plan.expert_groups == 0


@pytest.mark.parametrize(("vram", "rows", "groups", "buffers"), [(10, 2, 4, 2), (24, 8, 0, 1), (40, 16, 0, 2)])
def test_how_four_layers_of_mixtral_are_cut(vram: int, rows: int, groups: int, buffers: int) -> None:
    four = mixture(hidden=4096, wide=14336, experts=8, chosen=2, rest=41_984_000, layers=4, vocab=32_000)
    sizes = replace(four, widest_bytes_per_token=57_344)
    wanted = job(sizes, batch=64, seq=1024, vram=vram * GIB, stem_shared=False, limits=limits(128 * GIB), compiled=True)
    plan = attempt(wanted)
    assert (plan.micro_batch, plan.expert_groups, plan.grad_buffers) == (rows, groups, buffers)


def test_a_larger_step_needs_no_more_groups_device_memory() -> None:
    """Weights and buffers are those of a group, whatever passes through it."""
    small, large = plan_of(MIXTRAL, vram=10, batch=8), plan_of(MIXTRAL, vram=10, batch=32)
    same = ("weight slots", "groups of experts")
    assert small.expert_groups == large.expert_groups
    one, other = (plan.device["gradient buffers"] / plan.grad_buffers for plan in (small, large))
    assert one == other
    assert {k: small.device[k] for k in same} == {k: large.device[k] for k in same}
    waiting = "what the experts are called with"
    assert large.device[waiting] == pytest.approx(4 * small.device[waiting], rel=0.3)


def test_memory_is_set_by_the_group() -> None:
    """Twice as many experts in twice as many groups: the same bytes, but for the host."""
    twice = mixture(hidden=4096, wide=14336, experts=16, chosen=2, rest=41_984_000, layers=32, vocab=32_000)
    one, two = (list(cuts(asked(s, vram=10), groups=g))[-1] for s, g in ((MIXTRAL, 4), (twice, 8)))
    assert one.device == two.device
    assert two.host_total > 1.8 * one.host_total


def test_groups_are_counted_as_they_are_laid_out() -> None:
    known = ExpertSizes(5, 2, (130, 7), (2, 4), MIXTRAL.layers, 1, 1)
    grouped = GroupedExperts(MIXTRAL, known, 7)
    assert (grouped.height, grouped.count) == (3, 2)
    assert grouped.group_elems == 512 + 128  # 390 and 21, each padded to a multiple of 128
    assert grouped.group_bytes == 2 * 512 + 4 * 128
    for experts, groups in itertools.product((4, 5, 6, 7, 8, 60, 257), range(2, 40)):
        spans = [s.stop - s.start for s in spans_of(experts, groups=groups)]
        grouped = GroupedExperts(MIXTRAL, replace(known, count=experts), groups)
        assert (len(spans), max(spans), sum(spans)) == (grouped.count, grouped.height, experts)
        assert max(spans) - 1 <= min(spans) >= 2


def test_the_plan_says_what_groups_are_and_cost() -> None:
    wanted = asked(MIXTRAL, vram=10)
    plan = attempt(wanted)
    (said,) = [s for s in explain(plan, job=wanted) if "experts" in s]
    assert f"the 8 experts of a layer come in {plan.expert_groups} groups of" in said
    assert "because whole layers do not fit" in said
    assert not [s for s in explain(plan_of(MIXTRAL, vram=80), job=asked(MIXTRAL, vram=80)) if "experts" in s]


def test_on_the_cpu_nothing_is_grouped() -> None:
    assert attempt(job(MIXTRAL, limits=limits(2000 * GIB, vram=None))).expert_groups == 0


def test_a_resumed_run_keeps_its_groups_and_its_plan_survives_the_manifest() -> None:
    kept = plan_of(MIXTRAL, vram=10)
    assert MemoryPlan.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept
    old = {k: v for k, v in kept.to_dict().items() if k != "expert_groups"}
    assert MemoryPlan.from_dict(old).expert_groups == 0
    roomy = plan_of(MIXTRAL, vram=100, resumed=kept)
    assert (roomy.expert_groups, roomy.micro_batch, roomy.resident) == (kept.expert_groups, kept.micro_batch, 0)
    whole = plan_of(replace(MIXTRAL, experts=None), vram=100, resumed=kept)
    assert whole.expert_groups == 0


@pytest.mark.parametrize("scale", [0.05, 0.25, 0.5, 2])
def test_a_scaled_model_has_scaled_experts(scale: float) -> None:
    sizes = scaled(DEEPSEEK, scale)
    assert sizes.experts is not None
    assert len(sizes.experts.rest) == len(sizes.layers)
    wanted = asked(sizes, vram=1024, micro_batch=1)
    *_, plan = cuts(wanted, groups=64)
    four = 4 * 2 * 3 * 2048 * 7168 * scale * scale
    assert plan.device["groups of experts"] == pytest.approx(2 * four, rel=0.02)
    assert all(size >= 0 for size in plan.device.values())


def test_a_refusal_speaks_of_the_smallest_there_is() -> None:
    with pytest.raises(DoesNotFit) as caught:
        decide(asked(MIXTRAL, vram=2))
    assert "groups of experts" in str(caught.value)
    least = plan_of(MIXTRAL, vram=2)
    assert (least.fits, least.micro_batch, least.expert_groups) == (False, 1, 4)


def test_a_host_that_is_too_small_is_not_helped_by_groups() -> None:
    short = plan_of(MIXTRAL, vram=80, limits=limits(100 * GIB))
    assert (short.fits, short.expert_groups) == (False, 0)


def test_a_dense_model_knows_no_groups() -> None:
    assert attempt(job(SEVEN_B, vram=3 * GIB)).expert_groups == 0


def test_what_groups_cost_is_part_of_the_estimate() -> None:
    """What comes before the experts runs twice more, layers cross the link twice but for what is there at the turn."""
    rates = Rates("test", None, 5e14, 4e14, 3e12, 5e10, 5e10, 4e10, 1e11, 16, "test")
    plan = plan_of(MIXTRAL, vram=10)
    grouped, whole = (
        estimate(MIXTRAL, plan=p, rates=rates, tokens=16 * 2048) for p in (plan, replace(plan, expert_groups=0))
    )
    assert grouped.forward_s > whole.forward_s
    assert grouped.recompute_s > whole.recompute_s
    assert grouped.link_in_s > whole.link_in_s
    assert grouped.link_out_s == whole.link_out_s
    ours = replace(MIXTRAL, attention_bytes_per_token=8192)
    again = estimate(ours, plan=plan, rates=rates, tokens=16 * 2048)
    assert again.forward_s < grouped.forward_s  # attention of our own does not run again


def test_attention_that_waits_meanwhile_is_counted() -> None:
    ours = replace(MIXTRAL, attention_bytes_per_token=8192)
    one, two = (GroupedExperts(s, MIXTRAL.experts, 4).waiting_bytes(step_tokens=10, tokens=5) for s in (MIXTRAL, ours))  # type: ignore[arg-type]
    assert one == 10 * (4096 * (2 + 4) + 2 * 16) + 5 * 4096 * 2
    assert two == one + 10 * 8192


@pytest.mark.parametrize(
    ("rows", "groups", "slices", "optimizer_s", "step_s"),
    [(2, 4, 16, 1.12, 6.171), (5, 0, 0, 1.24, 2.966), (10, 0, 4, 1.32, 2.961)],
)
def test_four_layers_of_mixtral_take_as_long_as_on_an_h200(
    rows: int, groups: int, slices: int, optimizer_s: float, step_s: float
) -> None:
    """64k tokens, sequences of 1,024 (benchmarks/h200.md), cut as those runs were, with their rates."""
    four = mixture(hidden=4096, wide=14336, experts=8, chosen=2, rest=41_984_000, layers=4, vocab=32_000)
    asleep = 4 * (8 - 2) * 3 * 14336 * 4096
    four = replace(four, params_active=four.params_total - asleep)
    asked = job(four, batch=64, seq=1024, vram=80 * GIB, stem_shared=False, limits=limits(128 * GIB), micro_batch=rows)
    (plan, *_) = cuts(asked, slices=slices, groups=groups)
    rates = replace(
        assumed_rates("NVIDIA H200", cores=14),
        host_bytes=26 * four.params_total / optimizer_s,
        link_in_bytes=44.3e9,
        link_duplex_bytes=41.2e9,
    )
    found = estimate(four, plan=plan, rates=rates, tokens=65_536)
    assert found.step_s == pytest.approx(step_s, rel=0.125)
    assert found.light_s < step_s


@pytest.mark.parametrize("batch", [1, 2, 7, 24, 100, 257])
def test_every_way_to_cut_a_step_into_equal_parts_is_tried_once(batch: int) -> None:
    tried = [plan.micro_batch for plan in cuts(job(SEVEN_B, batch=batch, seq=2048, vram=24 * GIB))]
    rows = {-(-batch // parts) for parts in range(1, batch + 1)}
    assert list(dict.fromkeys(tried)) == sorted((n for n in rows if n <= 8), reverse=True)


def test_a_step_of_any_size_is_planned_in_no_time() -> None:
    """A search through every number of parts would not come back."""
    plan = attempt(job(SEVEN_B, batch=10**15, seq=2048, vram=24 * GIB))
    assert plan.micro_batches * plan.micro_batch >= 10**15
