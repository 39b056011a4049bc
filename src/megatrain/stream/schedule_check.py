"""Whether a plan keeps *bounded residency*: nothing is read where it is not, nothing is held beyond the places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from megatrain.stream.schedule import GROUP_PLACES, HEAD_PLACES, Do, Op, Stay, StepShape, text


class PlanError(ValueError):
    """A plan that would read what is not there or hold more than it may."""


def check(plan: Sequence[Op], shape: StepShape) -> None:
    """Raise PlanError, with the faulty operation marked, unless `plan` keeps *bounded residency*."""
    held = _Held(plan, shape)
    for index, op in enumerate(plan):
        held.index = index
        held.do(op)
    held.end()


class _Held:
    """What is on the device after the operations so far."""

    def __init__(self, plan: Sequence[Op], shape: StepShape) -> None:
        self.index = 0
        self._plan, self._shape = plan, shape
        self._resident: set[Stay] = {(unit, None) for unit in range(shape.resident)}
        self._always = frozenset(self._resident)
        self._stored: set[Stay] = set()
        self._attended: set[Stay] = set()  # layers that ran, whose attention may wait on the host
        self._loaded: list[Stay] = []  # one that is read twice is loaded twice
        self._graphs: set[Stay] = set()
        self._measured: set[Stay] = set()  # (part, micro-batch)
        self._slopes: set[Stay] = set()  # of the part whose sum is open
        self._routed: dict[Stay, int] = {}  # layers that ran up to their experts: groups seen since
        self._of_group: set[Stay] = set()  # (group, micro-batch) of the group whose sum is open

    def do(self, op: Op) -> None:
        key = (op.unit, op.micro_batch)
        match op.do:
            case Do.FETCH:
                self._fetch((op.unit, op.part))
            case Do.FREE:
                self._free((op.unit, op.part))
            case Do.SAVE:
                self._stored.add(key)
            case Do.LOAD:
                self._load(key)
            case Do.OFFLOAD:
                self._offload(op)
            case Do.AUX:
                pass
            case _:
                self._compute(op, key)

    def _load(self, key: Stay) -> None:
        if self._shape.load_buffers and key not in self._stored:
            self._refuse("loaded before it was saved")
        if self._shape.attention_buffers and key not in self._attended:
            self._refuse("loaded before the layer ran")
        self._loaded.append(key)
        if len(self._loaded) > self._shape.loads:
            self._refuse(f"more than {self._shape.loads} stored inputs on the device")

    def _fetch(self, stay: Stay) -> None:
        if stay in self._resident:
            self._refuse("fetched twice")
        self._resident.add(stay)
        layers = [part is not None for unit, part in self._resident - self._always if 0 < unit < self._shape.tail]
        if layers.count(False) > self._shape.slots:
            self._refuse(f"more than {self._shape.slots} layers resident")
        if layers.count(True) > GROUP_PLACES:
            self._refuse(f"more than {GROUP_PLACES} groups of experts resident")
        if sum(part is not None for unit, part in self._resident if unit == self._shape.tail) > HEAD_PLACES:
            self._refuse(f"more than {HEAD_PLACES} parts of the head resident")

    def _free(self, stay: Stay) -> None:
        if stay not in self._resident - self._always:
            self._refuse("freed but not resident")
        if any(unit == stay[0] for unit, _ in self._graphs):
            self._refuse("freed while a graph still reads it")
        self._resident.remove(stay)

    def _compute(self, op: Op, key: Stay) -> None:
        if not {(op.unit, None), (op.unit, op.part)} <= self._resident:
            self._refuse("not resident")
        match op.do:
            case Do.KEEP:
                self._graphs.add(key)
            case Do.ROUTE:
                self._routed[key] = 0
            case Do.REROUTE:
                self._routed[key] = 0
                self._read_input(key)
            case Do.MIX | Do.UNMIX:
                self._mix(op, key)
            case Do.FORWARD:
                self._mixed(key)
                self._attended.add(key)
            case Do.BACKWARD:
                self._backward(key)
            case Do.LSE:
                self._measured.add((op.part or 0, op.micro_batch))
            case Do.LOSS | Do.SLOPE if any(
                (part, op.micro_batch) not in self._measured for part in range(self._shape.head_slices)
            ):
                self._refuse("a part of the head was not measured")
            case Do.SLOPE:
                if any(part != op.part for part, _ in self._slopes):
                    self._refuse("the sum of another part is still open")
                self._slopes.add((op.part or 0, op.micro_batch))

    def _mix(self, op: Op, key: Stay) -> None:
        if key not in self._routed:
            self._refuse("the layer did not run up to its experts")
        self._routed[key] += 1
        if op.do is Do.UNMIX:
            if any(group != op.part for group, _ in self._of_group):
                self._refuse("the sum of another group is still open")
            self._of_group.add((op.part or 0, op.micro_batch))

    def _mixed(self, key: Stay) -> None:
        """A layer that goes on behind its experts."""
        groups = len(self._shape.groups(key[0]))
        if groups and self._routed.pop(key, -1) != groups:
            self._refuse("not every group of experts was added")

    def _backward(self, key: Stay) -> None:
        self._mixed(key)
        if self._of_group:
            self._refuse("the sum of a group of experts is still open")
        if self._shape.keeps(key[0]):
            if key not in self._graphs:
                self._refuse("no graph was kept")
            self._graphs.remove(key)
        self._read_input(key)

    def _read_input(self, key: Stay) -> None:
        if self._shape.loads:
            if key not in self._loaded:
                self._refuse("input not loaded")
            self._loaded.remove(key)

    def _offload(self, op: Op) -> None:
        if op.part is not None:
            added = self._slopes if op.unit == self._shape.tail else self._of_group
            if len(added) != self._shape.micro_batches:
                self._refuse("sent home before every micro-batch added to it")
            added.clear()

    def end(self) -> None:
        resident = self._resident - self._always
        if resident or self._loaded or self._graphs or self._slopes or self._routed:
            units = sorted({unit for unit, _ in resident})
            inputs, graphs = (sorted(found, key=str) for found in (self._loaded, self._graphs))
            raise PlanError(f"left over at the end: units {units}, inputs {inputs}, graphs {graphs}")

    def _refuse(self, why: str) -> NoReturn:
        marked = [
            f">>{text(op, self._shape)}<<" if i == self.index else text(op, self._shape)
            for i, op in enumerate(self._plan)
        ]
        raise PlanError(f"{why}: {' '.join(marked[max(0, self.index - 8) : self.index + 4])}")
