"""One step as data: the order in which units are fetched, used, sent home and let go.

`plan_step` is pure. Compute comes first: all micro-batches through one layer, then the next; the tail;
then back. A pass adds the fetches as early as the slots allow, another the loads of stored activations.
Printed, a step of two layers and two micro-batches on two slots is

    stem.fetch 0.fetch 1.fetch tail.fetch stem.embed.0 stem.embed.1 0.fwd.0 0.fwd.1 1.fwd.0 1.fwd.1 tail.loss.0 ...

At the turn from forward to backward the last layers are still in their slots, so nothing is fetched there.

The first `resident` units never leave the device: nothing fetches or frees them. The last `kept` layers run forward
with a graph, which their backward uses up instead of recomputing it.

With `head_slices` the head's weight comes in parts, on two places of its own, and is seen twice: once for the running
log-sum-exp (`lse`), once more, in reverse, for the gradients (`slope`):

    ... tail.fetch tail/0.fetch tail/1.fetch tail/0.lse.0 tail/0.lse.1 tail/0.free tail/2.fetch tail/1.lse.0 ...
    tail.loss.0 tail.loss.1 tail/2.slope.0 tail/2.slope.1 tail/2.off tail/2.free tail/0.fetch tail/1.slope.0 ...

Where the experts of a layer come in groups, the layer runs up to them (`route`), each group adds what it gives for
all micro-batches (`mix`), and the layer runs again with the sum (`fwd`); backwards `reroute`, `unmix` and `bwd`.
Groups have two places of their own, and what is read next is fetched next, be it a layer or a group:

    ... 0.fetch 0/0.fetch 0/1.fetch 0.route.0 0.route.1 0/0.mix.0 0/0.mix.1 0/0.free 0/2.fetch 0/1.mix.0 0/1.mix.1 ...
    0.fwd.0 0.fwd.1 ... 0.reroute.0 0.reroute.1 0/2.unmix.0 0/2.unmix.1 0/2.off ... 0.bwd.0 0.bwd.1 0.off
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

Stay = tuple[int, int | None]
"""What occupies a place: a unit, or a part of one."""
HEAD_PLACES = 2
"""Parts of the head on the device at once: one is used while the next arrives."""
GROUP_PLACES = 2
"""Groups of experts on the device at once, likewise."""


class Do(Enum):
    """What an operation does to its unit."""

    FETCH = "fetch"  # host -> slot, on the fetch stream
    EMBED = "embed"  # the stem of one micro-batch
    SAVE = "save"  # a layer's input -> host, on the send stream (activations: host)
    ROUTE = "route"  # a layer up to its experts, one micro-batch
    MIX = "mix"  # one group of experts on one micro-batch
    FORWARD = "fwd"  # a layer on one micro-batch, without a graph; what its experts give is known
    KEEP = "keep"  # the same with a graph, kept for the backward
    AUX = "aux"  # router loss over all micro-batches, at the turn
    LSE = "lse"  # one part of the head on one micro-batch: what the loss needs of it
    LOSS = "loss"  # head and loss of one micro-batch, with the gradient of the hidden state when training
    SLOPE = "slope"  # one part of the head on one micro-batch again: gradients of both
    LOAD = "load"  # a layer's stored input, its kept attention -> device, on the fetch stream
    REROUTE = "reroute"  # a layer up to its experts again, one micro-batch, and the gradient of what they give
    UNMIX = "unmix"  # one group of experts on one micro-batch again: gradients of both
    BACKWARD = "bwd"  # a layer recomputed with a graph (unless that was kept) and differentiated, one micro-batch
    UNEMBED = "unembed"  # the backward of the stem, one micro-batch
    OFFLOAD = "off"  # the summed gradient of a unit -> host, on the send stream
    FREE = "free"  # the slot may be fetched into again


@dataclass(frozen=True)
class Op:
    """`unit` counts as in the store: stem 0, layer i at i + 1, tail last. `part`: a slice of the head, or a group of
    a layer's experts."""

    do: Do
    unit: int
    micro_batch: int | None = None
    part: int | None = None


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
    attention_buffers: int = 0  # places for attention on its way back; 0: it stays on the device, or is recomputed
    head_slices: int = 0  # parts of the head; 0: the head comes with the rest of the tail
    expert_groups: tuple[int, ...] = ()  # per layer, of its experts; 0: it comes whole; (): so do all

    @property
    def tail(self) -> int:
        return self.layers + 1

    @property
    def loads(self) -> int:
        """How many backward operations ahead what they need is loaded; 0: nothing waits on the host."""
        return self.load_buffers or self.attention_buffers

    def streams(self, unit: int) -> bool:
        """Whether the unit is fetched when it is needed."""
        return unit >= self.resident

    def groups(self, unit: int) -> range:
        """The groups in which a layer's experts come."""
        return range(self.expert_groups[unit - 1] if self.expert_groups else 0)

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
    if shape.kept and shape.loads:
        raise ValueError("graphs are kept only where activations stay on the device")
    if any(shape.expert_groups) and (shape.resident or shape.kept):
        raise ValueError("with experts in groups no unit stays on the device, and no graph")
    if any(shape.expert_groups) and shape.attention_buffers:
        raise ValueError("layers whose experts come in groups read their input twice, and their attention once")
    if shape.load_buffers and shape.attention_buffers and shape.load_buffers != shape.attention_buffers:
        raise ValueError("inputs and attention are loaded together, so they need as many places")
    if shape.head_slices == 1 or (shape.head_slices and shape.resident):
        raise ValueError("a head in slices has at least two, and no unit stays on the device")
    return tuple(_with_loads(_with_fetches(_compute(shape), shape), shape))


def _compute(shape: StepShape) -> list[Op]:
    every = range(shape.micro_batches)
    ops = [Op(Do.EMBED, 0, m) for m in every]
    for unit in range(1, shape.tail):
        groups = shape.groups(unit)
        forward = [Op(Do.KEEP if shape.keeps(unit) else Do.FORWARD, unit, m) for m in every]
        for first in [Op(Do.ROUTE, unit, m) for m in every] if groups else forward:
            if shape.train and shape.load_buffers:
                ops.append(Op(Do.SAVE, unit, first.micro_batch))
            ops.append(first)
        ops += [Op(Do.MIX, unit, m, group) for group in groups for m in every]
        ops += forward if groups else []
    ops += _head(shape)
    if shape.streams(shape.tail):
        ops.append(Op(Do.FREE, shape.tail))
    if shape.train:
        for unit in reversed(range(1, shape.tail)):
            groups = shape.groups(unit)
            ops += [Op(Do.REROUTE, unit, m) for m in every if groups]
            for group in reversed(groups):
                ops += [Op(Do.UNMIX, unit, m, group) for m in every]
                ops.append(Op(Do.OFFLOAD, unit, None, group))
            ops += [Op(Do.BACKWARD, unit, m) for m in every]
            ops.append(Op(Do.OFFLOAD, unit))
        ops += [*(Op(Do.UNEMBED, 0, m) for m in every), Op(Do.OFFLOAD, 0)]
    return [*ops, Op(Do.FREE, 0)] if shape.streams(0) else ops


def _head(shape: StepShape) -> list[Op]:
    every, parts = range(shape.micro_batches), range(shape.head_slices)
    ops = [Op(Do.AUX, shape.tail)] if shape.train else []
    ops += [Op(Do.LSE, shape.tail, m, part) for part in parts for m in every]
    ops += [Op(Do.LOSS, shape.tail, m) for m in every]
    if not shape.train:
        return ops
    for part in reversed(parts):
        ops += [Op(Do.SLOPE, shape.tail, m, part) for m in every]
        ops.append(Op(Do.OFFLOAD, shape.tail, None, part))
    return [*ops, Op(Do.OFFLOAD, shape.tail)]


_OF_LAYERS = (Do.ROUTE, Do.FORWARD, Do.KEEP, Do.REROUTE, Do.BACKWARD)


def _with_fetches(compute: Sequence[Op], shape: StepShape) -> list[Op]:
    """Fetch each layer, each group of experts and each part of the head as early as a place can be given up."""

    def layer(op: Op) -> Stay | None:
        if op.do in (Do.MIX, Do.UNMIX):
            return (op.unit, op.part)
        return (op.unit, None) if op.do in _OF_LAYERS and shape.streams(op.unit) else None

    def part(op: Op) -> Stay | None:
        return (op.unit, op.part) if op.do in (Do.LSE, Do.SLOPE) else None

    ops = _fetched(compute, stay=layer, whole=shape.slots, parts=GROUP_PLACES, behind=None)
    fetch_tail = Op(Do.FETCH, shape.tail)
    if shape.streams(shape.tail):  # behind the last layer: it is needed next
        groups = shape.groups(shape.layers)
        last = Op(Do.FETCH, shape.layers, None, groups[-1] if groups else None)
        ops.insert(ops.index(last) + 1 if last in ops else 0, fetch_tail)
    if shape.streams(0):
        ops.insert(0, Op(Do.FETCH, 0))
    if not shape.head_slices:
        return ops
    return _fetched(ops, stay=part, whole=0, parts=HEAD_PLACES, behind=fetch_tail)


def _fetched(
    compute: Sequence[Op], *, stay: Callable[[Op], Stay | None], whole: int, parts: int, behind: Op | None
) -> list[Op]:
    """Insert the fetches and frees of what `stay` says that an operation reads, none before the operation `behind`.

    They come in the order of use. `whole` units and `parts` of units have a place at once; what is still in one is not
    fetched again.
    """
    stays: list[Stay] = []  # in order of use, one entry per stay
    stay_of: dict[int, int] = {}  # position in `compute` -> index of its stay
    for position, op in enumerate(compute):
        wanted = stay(op)
        if wanted is not None:
            if not stays or stays[-1] != wanted:
                stays.append(wanted)
            stay_of[position] = len(stays) - 1
    out: list[Op] = []
    resident: list[Stay] = []
    now, ahead = 0, 0
    begun = behind is None
    for position, op in enumerate(compute):
        now = stay_of.get(position, now)
        ahead = max(ahead, now)
        while begun and ahead < len(stays):
            if stays[ahead] not in resident:
                alike = [one for one in resident if (one[1] is None) is (stays[ahead][1] is None)]
                if len(alike) == (whole if stays[ahead][1] is None else parts):
                    idle = [one for one in alike if one not in stays[now : ahead + 1]]
                    if not idle:
                        break
                    resident.remove(idle[0])
                    out.append(_op(Do.FREE, idle[0]))
                resident.append(stays[ahead])
                out.append(_op(Do.FETCH, stays[ahead]))
            ahead += 1
        out.append(op)
        begun = begun or op == behind
    return [*out, *(_op(Do.FREE, one) for one in resident)]


def _op(do: Do, stay: Stay) -> Op:
    unit, part = stay
    return Op(do, unit, None, part)


def _with_loads(ops: Sequence[Op], shape: StepShape) -> list[Op]:
    """Load what waits on the host as many backward operations ahead as there are buffers, the first before the loss."""
    if not (shape.train and shape.loads):
        return list(ops)
    wanted = [Op(Do.LOAD, op.unit, op.micro_batch) for op in ops if op.do in (Do.REROUTE, Do.BACKWARD)]
    out: list[Op] = []
    issued = done = 0
    turned = False
    for op in ops:
        turned = turned or op.do is Do.LOSS
        while turned and issued < len(wanted) and issued < done + shape.loads:
            out.append(wanted[issued])
            issued += 1
        out.append(op)
        done += op.do in (Do.REROUTE, Do.BACKWARD)
    return out


def text(op: Op, shape: StepShape) -> str:
    """`3.fwd.0`: unit, operation, micro-batch; `tail/2.lse.0`: of part 2 of the head; `3/1.mix.0`: of group 1."""
    unit = "stem" if op.unit == 0 else "tail" if op.unit == shape.tail else str(op.unit - 1)
    unit += "" if op.part is None else f"/{op.part}"
    return f"{unit}.{op.do.value}" + ("" if op.micro_batch is None else f".{op.micro_batch}")


def show(plan: Sequence[Op], shape: StepShape) -> str:
    """The whole plan on one line."""
    return " ".join(text(op, shape) for op in plan)
