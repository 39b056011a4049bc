"""Weights on their way: the slots that layers stream through, and the two places of stem and tail.

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
from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.stream.device import Device, StreamName


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
        self.unit: int | None = None
        self.loaded = device.event(f"{name}.loaded")
        self.released = device.event(f"{name}.released")
        self._views: dict[int, dict[str, Tensor]] = {}

    @property
    def in_use(self) -> bool:
        return self.state is SlotState.IN_USE

    def views(self, unit: int, store: HostStore) -> dict[str, Tensor]:
        """Typed views of the unit's tensors in this block; made once."""
        if unit not in self._views:
            self._views[unit] = store.units[unit].unit.layout.views(self.block)
        return self._views[unit]


class WeightRing:
    """`slots` slots shared by the layers that stream, and one place each for stem, tail and the resident units."""

    def __init__(
        self,
        store: HostStore,
        *,
        device: Device,
        slots: int,
        updates: Updates,
        resident: Mapping[int, HostUnit],
        poison: bool = False,
    ) -> None:
        self._store, self._device, self._updates, self._poison = store, device, updates, poison
        streamed = [x.unit.layout.nbytes for x in store.layers if x.unit.index not in resident]
        self._shared = [self._slot(f"slot{i}", max(streamed)) for i in range(slots if streamed else 0)]
        ends = [end.unit for end in (store.stem, store.tail) if end.unit.index not in resident]
        self._own = {end.index: self._slot(end.name, end.layout.nbytes) for end in ends}
        for index, unit in resident.items():
            slot = self._own[index] = WeightSlot(unit.unit.name, block=unit.hi, device=device)
            slot.unit, slot.state = index, SlotState.IN_USE
        self._pending: deque[WeightSlot] = deque()
        self.blocked_s = 0.0  # host time spent waiting for the optimizer since the last reset

    def _slot(self, name: str, nbytes: int) -> WeightSlot:
        return WeightSlot(name, block=self._device.buffer(nbytes, dtype=torch.uint8), device=self._device)

    def block_of(self, unit: int) -> Tensor:
        """The place of the stem, the tail or a resident unit: always the same block."""
        return self._own[unit].block

    def holder(self, unit: int) -> WeightSlot:
        """The slot that holds the unit. Raises RuntimeError if none does."""
        slots = [self._own[unit]] if unit in self._own else self._shared
        for slot in slots:
            if slot.unit == unit:
                return slot
        raise RuntimeError(f"unit {unit} is in no slot: {[(s.name, s.unit, s.state.value) for s in slots]}")

    def prefetch(self, unit: int) -> None:
        """Give the unit a free slot; its fetch starts now or as soon as it is updated."""
        candidates = [self._own[unit]] if unit in self._own else self._shared
        slot = next((s for s in candidates if s.state is SlotState.FREE), None)
        if slot is None:
            raise RuntimeError(f"no free slot for unit {unit}: {[(s.name, s.unit, s.state.value) for s in candidates]}")
        slot.unit, slot.state = unit, SlotState.LOADING
        self._pending.append(slot)
        self.start_updated()

    def start_updated(self) -> None:
        """Start every pending fetch whose unit is updated, in order. Never blocks."""
        while self._pending and self._updates.updated(self._unit(self._pending[0])):
            self._start(self._pending.popleft())

    def acquire(self, unit: int) -> dict[str, Tensor]:
        """Views of the unit's tensors, for work enqueued on the compute stream from now on."""
        slot = self.holder(unit)
        while slot in self._pending:
            self._start(self._pending.popleft())
        if slot.state is SlotState.LOADING:
            self._device.wait(slot.loaded, on=StreamName.COMPUTE, keeps="no read before load")
            slot.state = SlotState.IN_USE
        return slot.views(unit, self._store)

    def release(self, unit: int) -> None:
        """The work enqueued so far was the last to read the unit."""
        slot = self.holder(unit)
        if slot.state is not SlotState.IN_USE:
            raise RuntimeError(f"unit {unit} released while {slot.state.value} in {slot.name}")
        if self._poison:  # a read after release finds NaN, not last step's weights
            self._device.touch(f"poison({unit})", on=StreamName.COMPUTE, writes=(slot.name,))
            slot.block.fill_(0xFF)
        self._device.record(slot.released, on=StreamName.COMPUTE)
        slot.unit, slot.state = None, SlotState.FREE

    @staticmethod
    def _unit(slot: WeightSlot) -> int:
        assert slot.unit is not None
        return slot.unit

    def _start(self, slot: WeightSlot) -> None:
        unit = self._unit(slot)
        began = time.perf_counter()
        self._updates.wait_updated(unit)  # no fetch before update; returns at once where it was seen to be done
        self.blocked_s += time.perf_counter() - began
        self._device.wait(slot.released, on=StreamName.FETCH, keeps="no overwrite before release")
        source = self._store.units[unit].hi
        self._device.copy(
            slot.block[: source.numel()], source=source, on=StreamName.FETCH, reads=f"host{unit}", writes=slot.name
        )
        self._device.record(slot.loaded, on=StreamName.FETCH)
