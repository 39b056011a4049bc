"""The step as data where the experts of layers come in groups."""

from __future__ import annotations

import itertools

import pytest

from megatrain.stream.schedule import Do, Op, StepShape, plan_step, show
from megatrain.stream.schedule_check import PlanError, check


def grouped(*groups: int, micro_batches: int = 1, loads: int = 0, train: bool = True, slices: int = 0) -> StepShape:
    return StepShape(len(groups), micro_batches, 2, loads, train, head_slices=slices, expert_groups=groups)


def test_a_layer_stops_at_its_experts_and_goes_on_behind_them() -> None:
    """Layer 1 has experts. Each group comes once for both micro-batches; at the turn two of them are still there."""
    s = grouped(0, 3, micro_batches=2)
    assert show(plan_step(s), s).split() == [
        "stem.fetch", "0.fetch", "1.fetch", "1/0.fetch", "1/1.fetch", "stem.embed.0", "stem.embed.1", "0.fwd.0",
        "0.fwd.1", "1.route.0", "1.route.1", "1/0.mix.0", "1/0.mix.1", "1/0.free", "1/2.fetch", "tail.fetch",
        "1/1.mix.0", "1/1.mix.1", "1/2.mix.0", "1/2.mix.1", "1.fwd.0", "1.fwd.1", "tail.aux", "tail.loss.0",
        "tail.loss.1", "tail.off", "tail.free", "1.reroute.0", "1.reroute.1", "1/2.unmix.0", "1/2.unmix.1", "1/2.off",
        "1/2.free", "1/0.fetch", "1/1.unmix.0", "1/1.unmix.1", "1/1.off", "1/0.unmix.0", "1/0.unmix.1", "1/0.off",
        "1.bwd.0", "1.bwd.1", "1.off", "0.bwd.0", "0.bwd.1", "0.off", "stem.unembed.0", "stem.unembed.1", "stem.off",
        "stem.free", "0.free", "1.free", "1/1.free", "1/0.free",
    ]  # fmt: skip


def test_what_is_read_next_is_fetched_next() -> None:
    """Updates end in that order, and a fetch that waits for its update must not hold up one that need not."""
    s = grouped(3, 0, 5, 2)
    plan = plan_step(s)
    turn = next(i for i, op in enumerate(plan) if op.do is Do.LOSS)
    fetched = [(op.unit, op.part) for op in plan[:turn] if op.do is Do.FETCH]
    read = [(op.unit, op.part) for op in plan[:turn] if op.do in (Do.EMBED, Do.ROUTE, Do.MIX, Do.FORWARD, Do.LOSS)]
    assert fetched == list(dict.fromkeys([*read, (s.tail, None)]))


def test_a_stored_input_comes_back_for_both_visits() -> None:
    s = grouped(2, micro_batches=2, loads=2)
    plan = show(plan_step(s), s)
    assert "0.save.0 0.route.0 0.save.1 0.route.1" in plan
    assert "0.load.0 0.load.1 tail.loss.0" in plan
    assert "0.reroute.0 0.load.0 0.reroute.1 0.load.1" in plan


@pytest.mark.parametrize("train", [True, False])
def test_every_small_shape_keeps_its_bounds(train: bool) -> None:
    for layers, m, loads, count, slices in itertools.product((1, 2, 4), (1, 3), (0, 1, 2), (1, 2, 3, 6), (0, 3)):
        for groups in {(count,) * layers, (0, *(count,) * (layers - 1)), (*(count,) * (layers - 1), 0)}:
            s = grouped(*groups, micro_batches=m, loads=loads, train=train, slices=slices)
            plan = plan_step(s)
            check(plan, s)
            fetches = [op for op in plan if op.do is Do.FETCH and op.part is not None and op.unit != s.tail]
            # both that are there at the turn are not fetched again: even those of the layer before a whole one
            assert len(fetches) == (2 * sum(groups) - min(2, sum(groups)) if train else sum(groups)), show(plan, s)
            assert sum(op.do is Do.MIX for op in plan) == sum(groups) * m
            assert sum(op.do is Do.UNMIX for op in plan) == (sum(groups) * m if train else 0)


def test_faulty_plans_are_refused() -> None:
    s = grouped(3, micro_batches=2)
    plan = list(plan_step(s))

    def without(op: Op) -> list[Op]:
        return [other for other in plan if other != op]

    with pytest.raises(PlanError, match=r"not resident: .*>>0/0\.mix\.0<<"):
        check(without(Op(Do.FETCH, 1, None, 0)), s)
    with pytest.raises(PlanError, match=r"did not run up to its experts: .*>>0/0\.mix\.1<<"):
        check(without(Op(Do.ROUTE, 1, 1)), s)
    with pytest.raises(PlanError, match=r"not every group of experts was added: .*>>0\.fwd\.1<<"):
        check(without(Op(Do.MIX, 1, 1, 2)), s)
    with pytest.raises(PlanError, match=r"did not run up to its experts: .*>>0/2\.unmix\.0<<"):
        check(without(Op(Do.REROUTE, 1, 0)), s)
    with pytest.raises(PlanError, match="before every micro-batch added"):
        check(without(Op(Do.UNMIX, 1, 1, 2)), s)
    with pytest.raises(PlanError, match="another group is still open"):
        check(without(Op(Do.OFFLOAD, 1, None, 2)), s)
    with pytest.raises(PlanError, match="a group of experts is still open"):
        check(without(Op(Do.OFFLOAD, 1, None, 0)), s)
    with pytest.raises(PlanError, match="more than 2 groups"):
        check(without(Op(Do.FREE, 1, None, 0)), s)


def test_no_unit_and_no_graph_stays() -> None:
    with pytest.raises(ValueError, match="no unit stays"):
        plan_step(StepShape(2, 1, 2, 0, True, resident=1, expert_groups=(2, 2)))
    with pytest.raises(ValueError, match="no graph"):
        plan_step(StepShape(2, 1, 2, 0, True, kept=1, expert_groups=(2, 2)))
