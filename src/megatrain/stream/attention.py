"""What attention gave in the forward, until the backward: on the device, on the host, or nowhere (then it runs again).

A layer hands out two tensors, output and log-sum-exp. They travel as stored inputs do (activations.py), under the same
waits, in a store of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatrain.host.arena import Arena
from megatrain.stream.activations import ActivationStore, DeviceActivations, HostActivations, Key
from megatrain.stream.device import Device
from megatrain.stream.step import Geometry


class KeptAttention:
    """Off where no store is given: it then takes and gives nothing."""

    def __init__(self, store: ActivationStore | None = None) -> None:
        self._store = store
        self._kept: set[Key] = set()

    @classmethod
    def of(cls, geometry: Geometry, *, device: Device, arena: Arena, layers: Sequence[int]) -> KeptAttention:
        """As the geometry says, for the units `layers`."""
        if not geometry.attention_bytes:
            return cls()
        if not geometry.attention_buffers:
            return cls(DeviceActivations())
        keys = [(unit, m) for unit in layers for m in range(geometry.micro_batches)]
        rows = {key: arena.take(geometry.attention_bytes, pinned=True) for key in keys}
        return cls(HostActivations(device, rows=rows, places=geometry.attention_buffers, name="attention"))

    @property
    def on(self) -> bool:
        """Whether layers are to hand it out."""
        return self._store is not None

    def save(self, key: Key, tensors: Sequence[Tensor]) -> None:
        """Keep what the work enqueued on compute so far has computed; of some layers that is nothing."""
        if self._store is None or not tensors:
            return
        self._kept.add(key)
        self._store.computed(key)
        self._store.save(key, *tensors)

    def load(self, key: Key) -> None:
        """Begin to bring it back."""
        if self._store is not None and key in self._kept:
            self._store.load(key)

    def take(self, key: Key) -> tuple[Tensor, ...]:
        """The tensors, for work enqueued on compute from now on."""
        return self._store.take(key) if self._store is not None and key in self._kept else ()

    def drop(self, key: Key) -> None:
        """The work enqueued so far was the last to read them."""
        if self._store is not None and key in self._kept:
            self._store.drop(key)
            self._kept.remove(key)
