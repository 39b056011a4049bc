"""Pieces of the optimizer's state that visit the device for their update, while the CPU updates others.

Where the update bounds the step, link and device are idle meanwhile. A piece comes in on a stream of its own, is
updated there, and goes home on another, so that weights and gradients on their way never queue behind it. The waits:

* *no overwrite before it is home*: a place takes the next piece when its last one has left;
* *no way home before the update*: the way home waits for the update;
* *no use before it is home*: `finish` returns when every piece is in host memory again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.host.visit import VISIT_BYTES, Visit
from megatrain.stream.device import Device, Event, StreamName

ALIGN = 256


class _Place:
    """Room for one piece on the device."""

    def __init__(self, name: str, *, device: Device) -> None:
        self.name = name
        self.block = device.buffer(place_bytes(), dtype=torch.uint8)
        self.updated = device.event(f"{name}.updated")
        self.home = device.event(f"{name}.home")

    def copies_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room for copies, one behind the other."""
        found, start = [], 0
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            found.append(self.block[start : start + nbytes].view(tensor.dtype))
            start += -(-nbytes // ALIGN) * ALIGN
        return found


def state_name(tensor: Tensor) -> str:
    """What a piece of host memory is called where accesses are checked."""
    return f"state at {tensor.data_ptr():#x}"


def place_bytes() -> int:
    """Of one place: five tensors of a piece, each aligned."""
    return VISIT_BYTES + 5 * ALIGN


class Visitors:
    """`places` pieces are on the device at once. One thread at a time."""

    def __init__(self, device: Device, *, places: int) -> None:
        self._device = device
        self._places = [_Place(f"visitor{i}", device=device) for i in range(places)]
        self._next = 0
        self._last: _Place | None = None
        self._span: tuple[Event, Event] | None = None

    def start(self, visits: Sequence[Visit]) -> None:
        """Enqueue the visits; their tensors belong to the device until `finish`."""
        began, self._last = self._device.mark(on=StreamName.VISIT_IN), None
        for visit in visits:
            self._visit(visit)
        # marked now: a mark set in `finish` would only say when the caller had time to ask
        self._span = began, self._device.mark(on=StreamName.VISIT_OUT)

    def finish(self) -> float:
        """Wait until all are home. Returns the seconds they took, from the first copy in to the last one out."""
        if self._last is None or self._span is None:
            return 0.0
        began, ended = self._span
        self._device.host_wait(self._last.home, keeps="no use before it is home")
        self._device.host_wait(ended, keeps="no use before it is home")
        return self._device.elapsed_s(began, end=ended)

    def _visit(self, visit: Visit) -> None:
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        device, there = self._device, place.copies_of([*visit.written, *visit.read])
        device.wait(place.home, on=StreamName.VISIT_IN, keeps="no overwrite before it is home")
        for target, source in zip(there, [*visit.written, *visit.read], strict=True):
            device.copy(target, source=source, on=StreamName.VISIT_IN, reads=state_name(source), writes=place.name)
        with device.on(StreamName.VISIT_IN):
            visit.update(there)
        device.record(place.updated, on=StreamName.VISIT_IN)
        device.wait(place.updated, on=StreamName.VISIT_OUT, keeps="no way home before the update")
        for source, target in zip(there, visit.written, strict=False):
            device.copy(target, source=source, on=StreamName.VISIT_OUT, reads=place.name, writes=state_name(target))
        device.record(place.home, on=StreamName.VISIT_OUT)
        self._last = place
