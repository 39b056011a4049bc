"""Where the layers' inputs wait for the backward: on the device, or in page-locked host memory.

On the host an input is written by the send stream while the forward goes on, and read back by the fetch
stream a few backward operations before it is needed. The waits, all of them:

* *no send before it is computed*: the send stream waits `input.computed`;
* *no reuse before it is sent*: compute waits `input.sent` before the tensor's memory may be used again;
* *no load before it is sent*: the fetch stream waits `input.sent`;
* *no overwrite before release*: the fetch stream waits `place.released`;
* *no read before load*: compute waits `place.loaded`.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from megatrain.stream.device import Device, StreamName

SENDS_IN_FLIGHT = 2
"""Inputs whose memory is held for the send stream; more only costs device memory."""


class ActivationStore(Protocol):
    """Keeps hidden states between the forward and the backward. Keys are (unit that reads it, micro-batch)."""

    def computed(self, key: tuple[int, int]) -> None:
        """The work enqueued so far has computed what that unit will read."""

    def save(self, key: tuple[int, int], hidden: Tensor) -> None:
        """Keep what a layer is about to read; enqueued on compute."""

    def load(self, key: tuple[int, int]) -> None:
        """Begin to bring it back."""

    def take(self, key: tuple[int, int]) -> Tensor:
        """The kept tensor, for work enqueued on compute from now on."""

    def put_back(self, key: tuple[int, int]) -> None:
        """The work enqueued so far has read it; it is loaded and taken once more."""

    def drop(self, key: tuple[int, int]) -> None:
        """The work enqueued so far was the last to read it."""


class DeviceActivations:
    """Inputs stay where they are; dropping one gives its memory back to compute, in stream order."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}

    def computed(self, key: tuple[int, int]) -> None:
        """Nothing to note: only compute reads it."""

    def save(self, key: tuple[int, int], hidden: Tensor) -> None:
        self._kept[key] = hidden

    def load(self, key: tuple[int, int]) -> None:
        """Nothing to do: it never left."""

    def take(self, key: tuple[int, int]) -> Tensor:
        return self._kept[key]

    def put_back(self, key: tuple[int, int]) -> None:
        """Nothing to do: it stays."""

    def drop(self, key: tuple[int, int]) -> None:
        del self._kept[key]


class Place:
    """A device buffer for one stored input on its way back."""

    def __init__(self, name: str, *, block: Tensor, device: Device) -> None:
        self.name = name
        self.block = block  # uint8
        self.key: tuple[int, int] | None = None
        self.loaded = device.event(f"{name}.loaded")
        self.released = device.event(f"{name}.released")


class HostActivations:
    """Inputs wait in page-locked host memory.

    rows: one uint8 tensor per (unit, micro-batch) of the plan, each large enough for one input.
    """

    def __init__(self, device: Device, *, rows: dict[tuple[int, int], Tensor], places: int) -> None:
        self._device, self._rows = device, rows
        largest = max(row.numel() for row in rows.values())
        self._places = [
            Place(f"place{i}", block=device.buffer(largest, dtype=torch.uint8), device=device) for i in range(places)
        ]
        self._computed = {key: device.event(f"input{key}.computed") for key in rows}
        self._sent = {key: device.event(f"input{key}.sent") for key in rows}
        self._shapes: dict[tuple[int, int], tuple[torch.Size, torch.dtype]] = {}
        self._sending: deque[tuple[tuple[int, int], Tensor]] = deque()

    def computed(self, key: tuple[int, int]) -> None:
        if key in self._computed:  # what the tail reads is not stored
            self._device.record(self._computed[key], on=StreamName.COMPUTE)

    def save(self, key: tuple[int, int], hidden: Tensor) -> None:
        while len(self._sending) >= SENDS_IN_FLIGHT:
            self._let_go()
        source = hidden.view(-1).view(torch.uint8)
        self._device.wait(self._computed[key], on=StreamName.SEND, keeps="no send before it is computed")
        self._device.copy(
            self._rows[key][: source.numel()],
            source=source,
            on=StreamName.SEND,
            reads=f"hidden{key}",
            writes=f"stored{key}",
        )
        self._device.record(self._sent[key], on=StreamName.SEND)
        self._shapes[key] = (hidden.shape, hidden.dtype)
        self._sending.append((key, hidden))

    def _let_go(self) -> None:
        key, _ = self._sending.popleft()
        self._device.wait(self._sent[key], on=StreamName.COMPUTE, keeps="no reuse before it is sent")
        self._device.touch(f"forget{key}", on=StreamName.COMPUTE, writes=(f"hidden{key}",))

    def load(self, key: tuple[int, int]) -> None:
        place = next((p for p in self._places if p.key is None), None)
        if place is None:
            raise RuntimeError(f"no free place for input {key}: {[p.key for p in self._places]}")
        place.key = key
        shape, dtype = self._shapes[key]
        nbytes = shape.numel() * dtype.itemsize
        self._device.wait(place.released, on=StreamName.FETCH, keeps="no overwrite before release")
        self._device.wait(self._sent[key], on=StreamName.FETCH, keeps="no load before it is sent")
        self._device.copy(
            place.block[:nbytes],
            source=self._rows[key][:nbytes],
            on=StreamName.FETCH,
            reads=f"stored{key}",
            writes=place.name,
        )
        self._device.record(place.loaded, on=StreamName.FETCH)

    def take(self, key: tuple[int, int]) -> Tensor:
        while self._sending:  # the forward is over: nothing is in flight for long
            self._let_go()
        place = self._holder(key)
        shape, dtype = self._shapes[key]
        self._device.wait(place.loaded, on=StreamName.COMPUTE, keeps="no read before load")
        self._device.touch(f"read{key}", on=StreamName.COMPUTE, reads=(place.name,))
        return place.block[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def put_back(self, key: tuple[int, int]) -> None:
        self.drop(key)  # the place; the row on the host stays as it is

    def drop(self, key: tuple[int, int]) -> None:
        place = self._holder(key)
        self._device.touch(f"last read{key}", on=StreamName.COMPUTE, reads=(place.name,))
        self._device.record(place.released, on=StreamName.COMPUTE)
        place.key = None

    def _holder(self, key: tuple[int, int]) -> Place:
        for place in self._places:
            if place.key == key:
                return place
        raise RuntimeError(f"input {key} was not loaded: {[p.key for p in self._places]}")
