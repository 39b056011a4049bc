"""Units that live on the device: weights, masters, moments and gradient; nothing of them crosses the link in a step.

Such a unit is a `HostUnit` whose tensors lie on the device, so that everything that reads or updates a unit of the
store takes it as it is. The store keeps its copy, which is that of the last `bring_home`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.stream.device import Device


class ResidentUnits:
    """The first units of a store, on the device. `units`: by index in the store."""

    def __init__(self, store: HostStore, *, device: Device, count: int) -> None:
        """Takes the memory. Raises DoesNotFit."""
        self._store, self._device = store, device
        self.units: Mapping[int, HostUnit] = {host.unit.index: self._place(host) for host in store.units[:count]}
        self._loaded = False

    def load(self) -> None:
        """Copy weights and optimizer state from the store, the first time: it may be filled until a step begins."""
        if not self._loaded:
            self._loaded = True
            for index, there in self.units.items():
                _copy(self._store.units[index], to=there)

    def bring_home(self) -> None:
        """Make the store's copy that of the device, for whoever reads it next. Waits for the device."""
        if self._loaded:
            for index, there in self.units.items():
                _copy(there, to=self._store.units[index])

    def _place(self, host: HostUnit) -> HostUnit:
        def like(tensor: Tensor) -> Tensor:
            return self._device.buffer(tensor.numel(), dtype=tensor.dtype)

        return replace(
            host,
            hi=like(host.hi),
            lo=like(host.lo),
            exp_avg=like(host.exp_avg),
            exp_avg_sq=like(host.exp_avg_sq),
            grad=like(host.grad),
            steps=host.steps.clone(),  # counted on the host, but not in the copy that a checkpoint may be reading
        )


def _copy(source: HostUnit, *, to: HostUnit) -> None:
    for target, tensor in zip(_state(to), _state(source), strict=True):
        target.copy_(tensor)
    to.version = source.version


def _state(host: HostUnit) -> tuple[Tensor, ...]:
    return host.hi, host.lo, host.exp_avg, host.exp_avg_sq, host.steps
