"""Weights on their way: the slots that layers stream through, the places of stem and tail, those of a sliced head.

Units that are resident on the device stand in places of their own, always in use; nothing of the following is for them.

A slot goes FREE -prefetch-> LOADING -acquire-> IN_USE -release-> FREE. The waits, all of them:

* *no fetch before update*: a fetch is enqueued only when the optimizer is done with that unit;
* *no overwrite before release*: the fetch stream waits `slot.released` (write after read);
* *no read before load*: the compute stream waits `slot.loaded` (read after write).

A prefetch whose unit is still being updated stays pending: the caller goes on enqueueing compute, and the
fetch starts as soon as the update is seen to be done, at the latest when its unit is acquired. Updates
finish in the order in which units are fetched, so no pending fetch is ever overtaken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.model.layout import FlatLayout
from megatrain.stream.device import Device, StreamName
from megatrain.stream.schedule import GROUP_PLACES, HEAD_PLACES, Stay
from megatrain.stream.sources import Source


class Updates(Protocol):
    """What the ring may know of the optimizer."""

    def updated(self, unit: int) -> bool:
        """Whether every update submitted for the unit is done."""

    def wait_updated(self, unit: int) -> None:
        """Return when every update submitted for the unit is done; raise what the optimizer raised."""


class SlotState(Enum):
    """Who may touch a slot."""

    FREE = "free"
    LOADING = "loading"
    IN_USE = "in use"


class WeightSlot:
    """One block on the device that holds the streamed weights of one unit at a time."""

    def __init__(self, name: str, *, block: Tensor, device: Device) -> None:
        self.name = name
        self.block = block  # uint8
        self.state = SlotState.FREE
        self.holds: Stay | None = None
        self.loaded = device.event(f"{name}.loaded")
        self.released = device.event(f"{name}.released")
        self._views: dict[Stay, dict[str, Tensor]] = {}

    @property
    def in_use(self) -> bool:
        return self.state is SlotState.IN_USE

    def views(self, stay: Stay, layout: FlatLayout) -> dict[str, Tensor]:
        """Typed views of the tensors of a unit, or a part of one, in this block; made once."""
        if stay not in self._views:
            self._views[stay] = layout.views(self.block)
        return self._views[stay]


class WeightRing:
    """`slots` slots shared by the layers that stream; a place for each end that streams, two for parts of the head, two
    for groups of experts."""

    def __init__(
        self,
        store: HostStore,
        *,
        device: Device,
        slots: int,
        updates: Updates,
        layers: Mapping[Stay, Source],
        ends: Mapping[Stay, Source],
        resident: Mapping[int, HostUnit],
        poison: bool = False,
    ) -> None:
        """layers: what slots and places of groups are filled with. ends: likewise of stem, tail, parts of the head."""
        self._store, self._device, self._updates, self._poison = store, device, updates, poison
        self._sources: dict[Stay, Source] = {stay: x for stay, x in layers.items() if stay[0] not in resident}
        shared = self._slots("slot", slots, [x for (_, part), x in self._sources.items() if part is None])
        groups = self._slots("group", GROUP_PLACES, [x for (_, part), x in self._sources.items() if part is not None])
        parts = self._slots("part", HEAD_PLACES, [source for (_, part), source in ends.items() if part is not None])
        self._candidates = {stay: shared if stay[1] is None else groups for stay in self._sources}
        for stay, source in ends.items():
            name = store.units[stay[0]].unit.name
            self._candidates[stay] = [self._slot(name, source.nbytes)] if stay[1] is None else parts
        for index, unit in resident.items():
            slot = WeightSlot(unit.unit.name, block=unit.hi, device=device)
            slot.holds, slot.state = (index, None), SlotState.IN_USE
            self._candidates[index, None] = [slot]
        self._sources |= ends
        self._pending: deque[WeightSlot] = deque()
        self.blocked_s = 0.0  # host time spent waiting for the optimizer since the last reset

    def _slots(self, name: str, count: int, sources: Collection[Source]) -> list[WeightSlot]:
        """Places that each take the largest of `sources`; none where there are none."""
        if not sources:
            return []
        nbytes = max(source.nbytes for source in sources)
        return [self._slot(f"{name}{i}", nbytes) for i in range(count)]

    def _slot(self, name: str, nbytes: int) -> WeightSlot:
        return WeightSlot(name, block=self._device.buffer(nbytes, dtype=torch.uint8), device=self._device)

    def block_of(self, unit: int) -> Tensor:
        """The place of the stem, the tail or a resident unit: always the same block."""
        (slot,) = self._candidates[unit, None]
        return slot.block

    def holder(self, unit: int, part: int | None = None) -> WeightSlot:
        """The slot that holds the unit. Raises RuntimeError if none does."""
        slots = self._candidates[unit, part]
        for slot in slots:
            if slot.holds == (unit, part):
                return slot
        raise RuntimeError(f"unit {unit} is in no slot: {[(s.name, s.holds, s.state.value) for s in slots]}")

    def prefetch(self, unit: int, part: int | None = None) -> None:
        """Give the unit a free slot; its fetch starts now or as soon as it is updated."""
        slots = self._candidates[unit, part]
        slot = next((s for s in slots if s.state is SlotState.FREE), None)
        if slot is None:
            raise RuntimeError(f"no free slot for unit {unit}: {[(s.name, s.holds, s.state.value) for s in slots]}")
        slot.holds, slot.state = (unit, part), SlotState.LOADING
        self._pending.append(slot)
        self.start_updated()

    def start_updated(self) -> None:
        """Start every pending fetch whose unit is updated, in order. Never blocks."""
        while self._pending and self._updates.updated(self._source(self._pending[0]).unit):
            self._start(self._pending.popleft())

    def acquire(self, unit: int, part: int | None = None) -> WeightSlot:
        """The unit's slot, for work enqueued on the compute stream from now on."""
        slot = self.holder(unit, part)
        while slot in self._pending:
            self._start(self._pending.popleft())
        if slot.state is SlotState.LOADING:
            self._device.wait(slot.loaded, on=StreamName.COMPUTE, keeps="no read before load")
            slot.state = SlotState.IN_USE
        return slot

    def release(self, unit: int, part: int | None = None) -> None:
        """The work enqueued so far was the last to read the unit."""
        slot = self.holder(unit, part)
        if slot.state is not SlotState.IN_USE:
            raise RuntimeError(f"unit {unit} released while {slot.state.value} in {slot.name}")
        if self._poison:  # a read after release finds NaN, not last step's weights
            self._device.touch(f"poison({slot.name})", on=StreamName.COMPUTE, writes=(slot.name,))
            slot.block.fill_(0xFF)
        self._device.record(slot.released, on=StreamName.COMPUTE)
        slot.holds, slot.state = None, SlotState.FREE

    def _source(self, slot: WeightSlot) -> Source:
        assert slot.holds is not None
        return self._sources[slot.holds]

    def _start(self, slot: WeightSlot) -> None:
        source = self._source(slot)
        began = time.perf_counter()
        self._updates.wait_updated(source.unit)  # no fetch before update; at once where it was seen to be done
        self.blocked_s += time.perf_counter() - began
        self._device.wait(slot.released, on=StreamName.FETCH, keeps="no overwrite before release")
        start = 0
        for piece in source.pieces(loaded=slot.loaded):
            start = start if piece.at is None else piece.at
            stop = start + piece.source.numel()
            target = slot.block[start:stop]
            self._device.copy(target, source=piece.source, on=StreamName.FETCH, reads=piece.reads, writes=slot.name)
            start = stop
        self._device.record(slot.loaded, on=StreamName.FETCH)
