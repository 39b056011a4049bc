"""The step as data: readable orders, bounded residency, and plans that are refused."""

from __future__ import annotations

import itertools

import pytest

from megatrain.stream.schedule import Do, Op, StepShape, plan_step, show
from megatrain.stream.schedule_check import PlanError, check


def shape(
    layers: int = 3, micro_batches: int = 1, slots: int = 2, load_buffers: int = 0, train: bool = True
) -> StepShape:
    return StepShape(layers, micro_batches, slots, load_buffers, train)


def test_a_step_reads_like_a_story() -> None:
    s = shape()
    assert show(plan_step(s), s).split() == [
        "stem.fetch", "0.fetch", "1.fetch", "stem.embed.0", "0.fwd.0",
        "0.free", "2.fetch", "tail.fetch", "1.fwd.0", "2.fwd.0",
        "tail.aux", "tail.loss.0", "tail.off", "tail.free", "2.bwd.0", "2.off",
        "2.free", "0.fetch", "1.bwd.0", "1.off", "0.bwd.0", "0.off", "stem.unembed.0", "stem.off", "stem.free",
        "1.free", "0.free",
    ]  # fmt: skip


def test_stored_inputs_come_back_ahead_of_the_backward() -> None:
    s = shape(layers=2, micro_batches=2, load_buffers=2)
    plan = show(plan_step(s), s)
    assert "0.save.0 0.fwd.0 0.save.1 0.fwd.1" in plan
    assert "1.load.0 1.load.1 tail.loss.0" in plan
    assert "1.bwd.0 0.load.0 1.bwd.1" in plan


def test_evaluation_is_the_same_forward_and_nothing_else() -> None:
    s = shape(train=False)
    assert not {op.do for op in plan_step(s)} & {Do.BACKWARD, Do.OFFLOAD, Do.SAVE, Do.UNEMBED}


@pytest.mark.parametrize("train", [True, False])
def test_every_small_shape_keeps_its_bounds(train: bool) -> None:
    for layers, m, slots, loads in itertools.product(range(1, 8), range(1, 4), range(2, 5), range(3)):
        s = StepShape(layers, m, slots, loads, train)
        plan = plan_step(s)
        check(plan, s)
        fetches = [op.unit for op in plan if op.do is Do.FETCH and op.unit not in (0, s.tail)]
        # forward fetches every layer once; backward only those that are no longer in a slot at the turn
        assert len(fetches) == layers + (max(0, layers - slots) if train else 0), (s, show(plan, s))
        assert sum(op.do is Do.BACKWARD for op in plan) == (layers * m if train else 0)


def test_prefetch_runs_ahead_of_compute_in_both_directions() -> None:
    s = shape(layers=6, micro_batches=2, slots=2)
    plan = plan_step(s)
    at = {(op.do, op.unit, op.micro_batch): i for i, op in reversed(list(enumerate(plan)))}
    fetched_again = [i for i, op in enumerate(plan) if op.do is Do.FETCH and i > at[Do.LOSS, s.tail, 0]]
    for unit in range(2, 7):  # layer u is on its way before layer u - 1 runs its first micro-batch
        assert at[Do.FETCH, unit, None] < at[Do.FORWARD, unit - 1, 0]
    for i in fetched_again:
        assert plan[i].unit < 5
        assert i < at[Do.BACKWARD, plan[i].unit + 1, 0]


def test_faulty_plans_are_refused_with_the_operation_marked() -> None:
    s = shape()
    plan = list(plan_step(s))
    without_fetch = [op for op in plan if op != Op(Do.FETCH, 2)]
    with pytest.raises(PlanError, match=r">>1\.fwd\.0<<"):
        check(without_fetch, s)
    without_free = [op for op in plan if op != Op(Do.FREE, 1)]
    with pytest.raises(PlanError, match="resident"):
        check(without_free, s)
    with pytest.raises(PlanError, match="left over"):
        check(plan[:-1], s)


def test_one_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        plan_step(shape(slots=1))


def sliced(slices: int, *, micro_batches: int = 1, loads: int = 0, train: bool = True) -> StepShape:
    return StepShape(2, micro_batches, 2, loads, train, head_slices=slices)


def test_a_head_in_slices_is_seen_twice_and_nothing_is_fetched_at_the_turn() -> None:
    s = sliced(3)
    assert show(plan_step(s), s).split() == [
        "stem.fetch", "0.fetch", "1.fetch", "tail.fetch", "tail/0.fetch", "tail/1.fetch", "stem.embed.0",
        "0.fwd.0", "1.fwd.0", "tail.aux", "tail/0.lse.0", "tail/0.free", "tail/2.fetch", "tail/1.lse.0",
        "tail/2.lse.0", "tail.loss.0", "tail/2.slope.0", "tail/2.off", "tail/2.free", "tail/0.fetch",
        "tail/1.slope.0", "tail/1.off", "tail/0.slope.0", "tail/0.off", "tail.off", "tail.free",
        "1.bwd.0", "1.off", "0.bwd.0", "0.off", "stem.unembed.0", "stem.off", "stem.free", "0.free", "1.free",
        "tail/1.free", "tail/0.free",
    ]  # fmt: skip


def test_slices_keep_their_bounds() -> None:
    for slices, m, loads, train in itertools.product(range(2, 9), range(1, 4), range(3), (True, False)):
        s = sliced(slices, micro_batches=m, loads=loads, train=train)
        plan = plan_step(s)
        check(plan, s)
        fetches = [op for op in plan if op.do is Do.FETCH and op.part is not None]
        assert len(fetches) == (2 * slices - 2 if train else slices)  # both at the turn are still there
        assert sum(op.do is Do.LSE for op in plan) == slices * m
        assert sum(op.do is Do.SLOPE for op in plan) == (slices * m if train else 0)


def test_faulty_plans_of_slices_are_refused() -> None:
    s = sliced(3, micro_batches=2)
    plan = list(plan_step(s))

    def without(op: Op) -> list[Op]:
        return [other for other in plan if other != op]

    with pytest.raises(PlanError, match=r"not resident: .*>>tail/0\.lse\.0<<"):
        check(without(Op(Do.FETCH, s.tail, None, 0)), s)
    with pytest.raises(PlanError, match=r"not measured: .*>>tail\.loss\.1<<"):
        check(without(Op(Do.LSE, s.tail, 1, 2)), s)
    with pytest.raises(PlanError, match="before every micro-batch added"):
        check(without(Op(Do.SLOPE, s.tail, 1, 2)), s)
    with pytest.raises(PlanError, match="still open"):
        check(without(Op(Do.OFFLOAD, s.tail, None, 2)), s)
    with pytest.raises(PlanError, match="more than 2 parts"):
        check(without(Op(Do.FREE, s.tail, None, 0)), s)
    with pytest.raises(ValueError, match="at least two"):
        plan_step(sliced(1))
    with pytest.raises(ValueError, match="no unit stays"):
        plan_step(StepShape(2, 1, 2, 0, True, resident=1, head_slices=2))
