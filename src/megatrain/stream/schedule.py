"""One step as data: the order in which units are fetched, used, sent home and let go.

`plan_step` is pure. Compute comes first: all micro-batches through one layer, then the next; the tail;
then back. A pass adds the fetches as early as the slots allow, another the loads of stored activations.
Printed, a step of two layers and two micro-batches on two slots is

    stem.fetch 0.fetch 1.fetch tail.fetch stem.embed.0 stem.embed.1 0.fwd.0 0.fwd.1 1.fwd.0 1.fwd.1 tail.loss.0 ...

At the turn from forward to backward the last layers are still in their slots, so nothing is fetched there.

The first `resident` units never leave the device: nothing fetches or frees them. The last `kept` layers run forward
with a graph, which their backward uses up instead of recomputing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Do(Enum):
    """What an operation does to its unit."""

    FETCH = "fetch"  # host -> slot, on the fetch stream
    EMBED = "embed"  # the stem of one micro-batch
    SAVE = "save"  # a layer's input -> host, on the send stream (activations: host)
    FORWARD = "fwd"  # a layer on one micro-batch, without a graph
    KEEP = "keep"  # the same with a graph, kept for the backward
    AUX = "aux"  # router loss over all micro-batches, at the turn
    LOSS = "loss"  # head and loss of one micro-batch, with the gradient of the hidden state when training
    LOAD = "load"  # a layer's stored input -> device, on the fetch stream
    BACKWARD = "bwd"  # a layer recomputed with a graph (unless that was kept) and differentiated, one micro-batch
    UNEMBED = "unembed"  # the backward of the stem, one micro-batch
    OFFLOAD = "off"  # the summed gradient of a unit -> host, on the send stream
    FREE = "free"  # the slot may be fetched into again


@dataclass(frozen=True)
class Op:
    """One operation. `unit` counts as in the store: stem 0, layer i at i + 1, tail last."""

    do: Do
    unit: int
    micro_batch: int | None = None


@dataclass(frozen=True)
class StepShape:
    """All that the order of a step depends on."""

    layers: int
    micro_batches: int
    slots: int  # for layers; stem and tail have places of their own
    load_buffers: int  # places for stored inputs on their way back; 0: activations stay on the device
    train: bool  # False: forward and loss only
    resident: int = 0  # units that stay on the device: stem, layer 0, 1, ..., the tail last
    kept: int = 0  # layers, from the last, whose graph is kept; only with activations on the device

    @property
    def tail(self) -> int:
        return self.layers + 1

    def streams(self, unit: int) -> bool:
        """Whether the unit is fetched when it is needed."""
        return unit >= self.resident

    def keeps(self, unit: int) -> bool:
        """Whether the unit is a layer whose graph is kept."""
        return self.train and self.tail - self.kept <= unit < self.tail


def plan_step(shape: StepShape) -> tuple[Op, ...]:
    """The operations of one step (or, not training, of one evaluation) in the order they are enqueued."""
    streamed = sum(shape.streams(unit) for unit in range(1, shape.tail))
    if shape.slots < min(2, streamed):
        raise ValueError(f"{shape.slots} slots cannot hide a transfer: at least 2 are needed")
    if shape.kept > (shape.layers if not streamed else shape.slots):
        raise ValueError(f"the graphs of {shape.kept} layers cannot be kept: their weights would be gone")
    if shape.kept and shape.load_buffers:
        raise ValueError("graphs are kept only where activations stay on the device")
    return tuple(_with_loads(_with_fetches(_compute(shape), shape), shape))


def _compute(shape: StepShape) -> list[Op]:
    every = range(shape.micro_batches)
    ops = [Op(Do.EMBED, 0, m) for m in every]
    for unit in range(1, shape.tail):
        for m in every:
            if shape.train and shape.load_buffers:
                ops.append(Op(Do.SAVE, unit, m))
            ops.append(Op(Do.KEEP if shape.keeps(unit) else Do.FORWARD, unit, m))
    if shape.train:
        ops.append(Op(Do.AUX, shape.tail))
    ops += [Op(Do.LOSS, shape.tail, m) for m in every]
    free_tail = [Op(Do.FREE, shape.tail)] if shape.streams(shape.tail) else []
    free_stem = [Op(Do.FREE, 0)] if shape.streams(0) else []
    if not shape.train:
        return [*ops, *free_tail, *free_stem]
    ops += [Op(Do.OFFLOAD, shape.tail), *free_tail]
    for unit in reversed(range(1, shape.tail)):
        ops += [Op(Do.BACKWARD, unit, m) for m in every]
        ops.append(Op(Do.OFFLOAD, unit))
    ops += [Op(Do.UNEMBED, 0, m) for m in every]
    return [*ops, Op(Do.OFFLOAD, 0), *free_stem]


def _with_fetches(compute: Sequence[Op], shape: StepShape) -> list[Op]:
    """Fetch each layer as early as a slot can be given up; a layer that is still there is not fetched again."""
    visits: list[int] = []  # the layers in order of use, one entry per stay
    visit_of: dict[int, int] = {}  # position in `compute` -> index of its visit
    for position, op in enumerate(compute):
        if op.do in (Do.FORWARD, Do.KEEP, Do.BACKWARD) and shape.streams(op.unit):
            if not visits or visits[-1] != op.unit:
                visits.append(op.unit)
            visit_of[position] = len(visits) - 1
    out: list[Op] = [Op(Do.FETCH, 0)] if shape.streams(0) else []
    resident: list[int] = []
    now, ahead = 0, 0
    tail_fetched = not shape.streams(shape.tail)
    if not visits and not tail_fetched:
        out.append(Op(Do.FETCH, shape.tail))
        tail_fetched = True
    for position, op in enumerate(compute):
        now = visit_of.get(position, now)
        ahead = max(ahead, now)
        while ahead < len(visits):
            if visits[ahead] not in resident:
                if len(resident) == shape.slots:
                    idle = [unit for unit in resident if unit not in visits[now : ahead + 1]]
                    if not idle:
                        break
                    resident.remove(idle[0])
                    out.append(Op(Do.FREE, idle[0]))
                resident.append(visits[ahead])
                out.append(Op(Do.FETCH, visits[ahead]))
            if not tail_fetched and visits[ahead] == shape.layers:
                out.append(Op(Do.FETCH, shape.tail))  # behind the last layer: it is needed next
                tail_fetched = True
            ahead += 1
        out.append(op)
    return [*out, *(Op(Do.FREE, unit) for unit in resident)]


def _with_loads(ops: Sequence[Op], shape: StepShape) -> list[Op]:
    """Load stored inputs as many backward operations ahead as there are buffers, the first before the loss."""
    if not (shape.train and shape.load_buffers):
        return list(ops)
    wanted = [Op(Do.LOAD, op.unit, op.micro_batch) for op in ops if op.do is Do.BACKWARD]
    out: list[Op] = []
    issued = done = 0
    turned = False
    for op in ops:
        turned = turned or op.do is Do.LOSS
        while turned and issued < len(wanted) and issued < done + shape.load_buffers:
            out.append(wanted[issued])
            issued += 1
        out.append(op)
        done += op.do is Do.BACKWARD
    return out


class PlanError(ValueError):
    """A plan that would read what is not there or hold more than it may."""


def check(plan: Sequence[Op], shape: StepShape) -> None:
    """Raise PlanError, with the faulty operation marked, unless `plan` keeps *bounded residency*."""
    always = set(range(shape.resident))
    resident: set[int] = set()
    stored: set[tuple[int, int | None]] = set()
    loaded: set[tuple[int, int | None]] = set()
    graphs: set[tuple[int, int | None]] = set()

    def refuse(index: int, why: str) -> None:
        marked = [f">>{text(o, shape)}<<" if i == index else text(o, shape) for i, o in enumerate(plan)]
        raise PlanError(f"{why}: {' '.join(marked[max(0, index - 8) : index + 4])}")

    for index, op in enumerate(plan):
        key = (op.unit, op.micro_batch)
        match op.do:
            case Do.FETCH:
                if op.unit in resident | always:
                    refuse(index, "fetched twice")
                resident.add(op.unit)
                if len(resident - {0, shape.tail}) > shape.slots:
                    refuse(index, f"more than {shape.slots} layers resident")
            case Do.FREE:
                if op.unit not in resident:
                    refuse(index, "freed but not resident")
                if any(unit == op.unit for unit, _ in graphs):
                    refuse(index, "freed while a graph still reads it")
                resident.remove(op.unit)
            case Do.SAVE:
                stored.add(key)
            case Do.LOAD:
                if key not in stored:
                    refuse(index, "loaded before it was saved")
                loaded.add(key)
                if len(loaded) > shape.load_buffers:
                    refuse(index, f"more than {shape.load_buffers} stored inputs on the device")
            case Do.EMBED | Do.FORWARD | Do.KEEP | Do.LOSS | Do.BACKWARD | Do.UNEMBED:
                if op.unit not in resident | always:
                    refuse(index, "not resident")
                if op.do is Do.KEEP:
                    graphs.add(key)
                if op.do is Do.BACKWARD and shape.keeps(op.unit):
                    if key not in graphs:
                        refuse(index, "no graph was kept")
                    graphs.remove(key)
                if op.do is Do.BACKWARD and shape.load_buffers:
                    if key not in loaded:
                        refuse(index, "input not loaded")
                    loaded.remove(key)
            case Do.AUX | Do.OFFLOAD:
                pass
    if resident or loaded or graphs:
        left = f"units {sorted(resident)}, inputs {sorted(loaded, key=str)}, graphs {sorted(graphs, key=str)}"
        raise PlanError(f"left over at the end: {left}")


def text(op: Op, shape: StepShape) -> str:
    """`3.fwd.0`: unit, operation, micro-batch."""
    unit = "stem" if op.unit == 0 else "tail" if op.unit == shape.tail else str(op.unit - 1)
    return f"{unit}.{op.do.value}" + ("" if op.micro_batch is None else f".{op.micro_batch}")


def show(plan: Sequence[Op], shape: StepShape) -> str:
    """The whole plan on one line."""
    return " ".join(text(op, shape) for op in plan)
