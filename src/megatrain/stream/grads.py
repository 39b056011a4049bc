"""Gradients on their way home: summed in fp32 on the device, cast once, sent once per unit and step.

A staging buffer goes filled (compute) -> offloaded (send) -> filled. The waits, all of them:

* *no refill before offload*: compute waits `staging.offloaded` before it casts into the buffer again;
* *no offload before fill*: the send stream waits `staging.filled`;
* *no offload into an unread slab* needs no wait of its own: the unit was fetched earlier in this step, and
  *no fetch before update* means the optimizer had read its last slab by then.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatrain.host.store import HostUnit
from megatrain.stream.device import Device, Event, StreamName


class GradientSum:
    """fp32 sums of one unit's gradients over the micro-batches of a step, and their norms.

    flat: fp32 [elems] on the device. Only compute-stream work touches it.
    """

    def __init__(self, unit: HostUnit, *, flat: Tensor) -> None:
        self.unit = unit
        self.flat = flat[: unit.unit.layout.elems]
        self._views = unit.unit.layout.elem_views(self.flat)
        self._touched: dict[str, bool] = {}

    def open(self) -> None:
        """Begin a new sum. Zeroes everything: padding and parameters without a gradient must read as zero."""
        self.flat.zero_()
        self._touched = dict.fromkeys(self._views, False)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a micro-batch's gradient, any float dtype. The first is copied, so its bits stay as they are."""
        view = self._views[name]
        if self._touched[name]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self._touched[name] = True

    @property
    def touched(self) -> tuple[bool, ...]:
        """Per parameter, in layout order: whether any micro-batch gave it a gradient."""
        return tuple(self._touched.values())

    def norms(self) -> Tensor:
        """The 2-norm of each parameter's summed gradient, fp32 [parameters] (zero where untouched)."""
        return torch.stack(torch._foreach_norm(list(self._views.values()), 2.0))


class Staging:
    """A device buffer in which a gradient waits, in its streamed dtype, for the send stream."""

    def __init__(self, name: str, *, block: Tensor, device: Device) -> None:
        self.name = name
        self.block = block  # uint8
        self.filled = device.event(f"{name}.filled")
        self.offloaded = device.event(f"{name}.offloaded")


class GradientRing:
    """Staging buffers used in turn. A unit larger than a buffer goes in pieces."""

    def __init__(self, device: Device, *, buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._ring = [
            Staging(f"staging{i}", block=device.buffer(buffer_bytes, dtype=torch.uint8), device=device)
            for i in range(buffers)
        ]
        self._next = 0
        self._buffer_bytes = buffer_bytes

    def offload(self, total: GradientSum) -> Event:
        """Send the finished sum to the unit's host slab. Returns the event "slab complete"."""
        unit = total.unit
        complete = self._device.event(f"slab{unit.unit.index}.complete")
        for dtype, source, target in _pieces(total, most_bytes=self._buffer_bytes):
            staging = self._ring[self._next]
            self._next = (self._next + 1) % len(self._ring)
            self._device.wait(staging.offloaded, on=StreamName.COMPUTE, keeps="no refill before offload")
            self._device.touch(f"cast({unit.unit.index})", on=StreamName.COMPUTE, writes=(staging.name,))
            block = staging.block[: target.numel()]
            block.view(dtype).copy_(source)
            self._device.record(staging.filled, on=StreamName.COMPUTE)
            self._device.wait(staging.filled, on=StreamName.SEND, keeps="no offload before fill")
            self._device.copy(
                target, source=block, on=StreamName.SEND, reads=staging.name, writes=f"slab{unit.unit.index}"
            )
            self._device.record(staging.offloaded, on=StreamName.SEND)
        self._device.record(complete, on=StreamName.SEND)
        return complete

    def keep(self, total: GradientSum) -> None:
        """Cast the finished sum of a resident unit into its slab on the device: compute writes it, compute reads it."""
        for dtype, source, target in _pieces(total, most_bytes=total.unit.grad.numel()):
            target.view(dtype).copy_(source)


def _pieces(total: GradientSum, *, most_bytes: int) -> Iterator[tuple[torch.dtype, Tensor, Tensor]]:
    """(streamed dtype, fp32 source on the device, uint8 target in the slab), each of at most `most_bytes`."""
    layout = total.unit.unit.layout
    slab = total.unit.grad
    for dtype, first, last, byte in (
        (torch.bfloat16, 0, layout.bf16_elems, 0),
        (torch.float32, layout.bf16_elems, layout.elems, layout.bf16_bytes),
    ):
        step = most_bytes // dtype.itemsize
        for start in range(first, last, step or 1):
            stop = min(start + step, last)
            begin = byte + (start - first) * dtype.itemsize
            yield dtype, total.flat[start:stop], slab[begin : begin + (stop - start) * dtype.itemsize]
