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

Key = tuple[int, int]
"""Unit, micro-batch."""
PIECE_BYTES = 256
"""Where one key keeps several tensors, each begins at a multiple of it."""


class ActivationStore(Protocol):
    """Keeps tensors between the forward and the backward. Keys are (unit that reads them, micro-batch)."""

    def computed(self, key: Key) -> None:
        """The work enqueued so far has computed what that unit will read."""

    def save(self, key: Key, *tensors: Tensor) -> None:
        """Keep contiguous tensors, a layer's input for example; enqueued on compute."""

    def load(self, key: Key) -> None:
        """Begin to bring them back."""

    def take(self, key: Key) -> tuple[Tensor, ...]:
        """The kept tensors, for work enqueued on compute from now on."""

    def put_back(self, key: Key) -> None:
        """The work enqueued so far has read them; they are loaded and taken once more."""

    def drop(self, key: Key) -> None:
        """The work enqueued so far was the last to read them."""


class DeviceActivations:
    """Tensors stay where they are; dropping them gives their memory back to compute, in stream order."""

    def __init__(self) -> None:
        self._kept: dict[Key, tuple[Tensor, ...]] = {}

    def computed(self, key: Key) -> None:
        """Nothing to note: only compute reads them."""

    def save(self, key: Key, *tensors: Tensor) -> None:
        self._kept[key] = tensors

    def load(self, key: Key) -> None:
        """Nothing to do: they never left."""

    def take(self, key: Key) -> tuple[Tensor, ...]:
        return self._kept[key]

    def put_back(self, key: Key) -> None:
        """Nothing to do: they stay."""

    def drop(self, key: Key) -> None:
        del self._kept[key]


class Place:
    """A device buffer for what one key keeps, on its way back."""

    def __init__(self, name: str, *, block: Tensor, device: Device) -> None:
        self.name = name
        self.block = block  # uint8
        self.key: Key | None = None
        self.loaded = device.event(f"{name}.loaded")
        self.released = device.event(f"{name}.released")


class HostActivations:
    """Tensors wait in page-locked host memory.

    rows: one uint8 tensor per (unit, micro-batch) of the plan, each large enough for what one key keeps. name: what
    waits, for messages and timelines.
    """

    def __init__(self, device: Device, *, rows: dict[Key, Tensor], places: int, name: str = "hidden") -> None:
        self._device, self._rows, self._name = device, rows, name
        largest = max(row.numel() for row in rows.values())
        self._places = [
            Place(f"{name} place{i}", block=device.buffer(largest, dtype=torch.uint8), device=device)
            for i in range(places)
        ]
        self._computed = {key: device.event(f"{name}{key}.computed") for key in rows}
        self._sent = {key: device.event(f"{name}{key}.sent") for key in rows}
        self._shapes: dict[Key, list[tuple[torch.Size, torch.dtype]]] = {}
        self._sending: deque[tuple[Key, tuple[Tensor, ...]]] = deque()

    def computed(self, key: Key) -> None:
        if key in self._computed:  # what the tail reads is not stored
            self._device.record(self._computed[key], on=StreamName.COMPUTE)

    def save(self, key: Key, *tensors: Tensor) -> None:
        while len(self._sending) >= SENDS_IN_FLIGHT:
            self._let_go()
        self._shapes[key] = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._device.wait(self._computed[key], on=StreamName.SEND, keeps="no send before it is computed")
        for tensor, span in zip(tensors, self._spans(key), strict=True):
            self._device.copy(
                self._rows[key][span],
                source=tensor.view(-1).view(torch.uint8),
                on=StreamName.SEND,
                reads=f"{self._name}{key}",
                writes=f"stored {self._name}{key}",
            )
        self._device.record(self._sent[key], on=StreamName.SEND)
        self._sending.append((key, tensors))

    def _spans(self, key: Key) -> list[slice]:
        """Where each tensor of the key lies in its row, and in a place."""
        spans, at = [], 0
        for shape, dtype in self._shapes[key]:
            end = at + shape.numel() * dtype.itemsize
            spans.append(slice(at, end))
            at = -(-end // PIECE_BYTES) * PIECE_BYTES
        return spans

    def _let_go(self) -> None:
        key, _ = self._sending.popleft()
        self._device.wait(self._sent[key], on=StreamName.COMPUTE, keeps="no reuse before it is sent")
        self._device.touch(f"forget {self._name}{key}", on=StreamName.COMPUTE, writes=(f"{self._name}{key}",))

    def load(self, key: Key) -> None:
        place = next((p for p in self._places if p.key is None), None)
        if place is None:
            raise RuntimeError(f"no free place for {self._name} {key}: {[p.key for p in self._places]}")
        place.key = key
        self._device.wait(place.released, on=StreamName.FETCH, keeps="no overwrite before release")
        self._device.wait(self._sent[key], on=StreamName.FETCH, keeps="no load before it is sent")
        end = self._spans(key)[-1].stop
        self._device.copy(
            place.block[:end],
            source=self._rows[key][:end],
            on=StreamName.FETCH,
            reads=f"stored {self._name}{key}",
            writes=place.name,
        )
        self._device.record(place.loaded, on=StreamName.FETCH)

    def take(self, key: Key) -> tuple[Tensor, ...]:
        while self._sending:  # the forward is over: nothing is in flight for long
            self._let_go()
        place = self._holder(key)
        self._device.wait(place.loaded, on=StreamName.COMPUTE, keeps="no read before load")
        self._device.touch(f"read {self._name}{key}", on=StreamName.COMPUTE, reads=(place.name,))
        pieces = zip(self._spans(key), self._shapes[key], strict=True)
        return tuple(place.block[span].view(dtype).view(shape) for span, (shape, dtype) in pieces)

    def put_back(self, key: Key) -> None:
        self.drop(key)  # the place; the row on the host stays as it is

    def drop(self, key: Key) -> None:
        place = self._holder(key)
        self._device.touch(f"last read {self._name}{key}", on=StreamName.COMPUTE, reads=(place.name,))
        self._device.record(place.released, on=StreamName.COMPUTE)
        place.key = None

    def _holder(self, key: Key) -> Place:
        for place in self._places:
            if place.key == key:
                return place
        raise RuntimeError(f"{self._name} {key} was not loaded: {[p.key for p in self._places]}")
