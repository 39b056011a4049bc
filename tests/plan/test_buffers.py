"""When gradients go home through one buffer, and what fused experts need of PyTorch's pool."""

from __future__ import annotations

import pytest
from jobs import GIB, SEVEN_B, TINY, job, limits
from test_expert_groups_plan import MIXTRAL, asked

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import WORTH_TOKENS, attempt, cuts
from megatrain.plan.explain import explain
from megatrain.plan.job import Job

POOL = "PyTorch's pool beyond what is in use"


def seven(*, vram: int, batch: int = 64) -> Job:
    return job(SEVEN_B, batch=batch, seq=1024, vram=vram * GIB, stem_shared=False)


def with_two(wanted: Job) -> MemoryPlan:
    """The first cut that fits; the last, if none does."""
    plans = list(cuts(wanted))
    return next((plan for plan in plans if plan.fits), plans[-1])


def test_one_buffer_where_more_rows_fit_so_and_two_where_rows_are_enough() -> None:
    short, roomy = attempt(seven(vram=9)), attempt(seven(vram=24))
    assert (short.fits, short.grad_buffers, roomy.grad_buffers) == (True, 1, 2)
    two = with_two(seven(vram=9))
    assert short.micro_batch > two.micro_batch
    assert two.micro_batch * 1024 < WORTH_TOKENS <= roomy.micro_batch * 1024
    assert 2 * short.device["gradient buffers"] == two.device["gradient buffers"]


def test_what_fits_with_one_buffer_only_has_one() -> None:
    ever_less = (
        job(SEVEN_B, batch=64, seq=1024, vram=mib << 20, stem_shared=False) for mib in range(9 << 10, 4 << 10, -64)
    )
    wanted = next(one for one in ever_less if not with_two(one).fits)
    found = attempt(wanted)
    assert (found.fits, found.grad_buffers) == (True, 1)


def test_a_plan_that_does_not_fit_misses_by_the_least_there_is() -> None:
    nearest = attempt(seven(vram=2))
    assert (nearest.fits, nearest.grad_buffers, nearest.micro_batch) == (False, 1, 1)


def test_a_resumed_run_has_as_many_as_now_make_it_fit() -> None:
    short = attempt(seven(vram=9))
    again = attempt(job(SEVEN_B, batch=64, seq=1024, vram=9 * GIB, stem_shared=False, resumed=short))
    assert (again.micro_batch, again.grad_buffers, again.fits) == (short.micro_batch, 1, True)
    roomy = attempt(job(SEVEN_B, batch=64, seq=1024, vram=40 * GIB, stem_shared=False, resumed=short))
    assert (roomy.micro_batch, roomy.grad_buffers) == (short.micro_batch, 2)


def test_the_plan_says_so() -> None:
    said = explain(attempt(seven(vram=9)), job=seven(vram=9))
    assert [s for s in said if s.startswith("gradients go home through one buffer (")]
    assert not [s for s in explain(attempt(seven(vram=24)), job=seven(vram=24)) if "one buffer" in s]
    on_cpu = job(TINY, limits=limits(64 * GIB, vram=None))
    assert not [s for s in explain(attempt(on_cpu), job=on_cpu) if "one buffer" in s]


@pytest.mark.parametrize("groups", [0, 2, 4])
def test_a_hole_for_the_largest_gradient_of_experts(groups: int) -> None:
    """Mixtral's gate and up projections: 2 x 14336 x 4096 of each of 8 experts, in bf16, or of those of a group."""
    (plan, *_) = cuts(asked(MIXTRAL, vram=80), groups=groups)
    height = 8 // groups if groups else 8
    assert plan.device[POOL] == height * 2 * 14336 * 4096 * 2


def test_without_experts_the_pool_is_the_compilers() -> None:
    (plain, *_) = cuts(seven(vram=24))
    (compiled, *_) = cuts(job(SEVEN_B, batch=64, seq=1024, vram=24 * GIB, stem_shared=False, compiled=True))
    assert POOL not in plain.device
    assert compiled.device[POOL] == compiled.device["one layer's backward or the head"] // 8
