"""Gradients on their way home: summed in fp32 on the device, cast once, sent once per unit and step.

A staging buffer goes filled (compute) -> offloaded (send) -> filled. The waits, all of them:

* *no refill before offload*: compute waits `staging.offloaded` before it casts into the buffer again;
* *no offload before fill*: the send stream waits `staging.filled`;
* *no offload into an unread slab* needs no wait of its own: the unit was fetched earlier in this step, and
  *no fetch before update* means the optimizer had read its last slab by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.host.store import HostUnit
from megatrain.model.anatomy import Unit
from megatrain.stream.device import Device, Event, StreamName


@dataclass(frozen=True)
class Run:
    """fp32 numbers on the device, and the bytes at home that they become in `dtype`."""

    dtype: torch.dtype
    source: Tensor  # fp32 [n], contiguous
    target: Tensor  # uint8 [n * dtype.itemsize]
    writes: str  # what the target is called where accesses are checked


def slab_run(host: HostUnit, source: Tensor, *, dtype: torch.dtype, place: slice) -> Run:
    """A run into bytes `place` of the unit's gradient slab."""
    return Run(dtype, source, host.grad[place], f"slab{host.unit.index}")


class GradientSum:
    """fp32 sums of one unit's gradients over the micro-batches of a step, and their norms.

    flat: fp32 on the device. Only compute-stream work touches it.
    """

    def __init__(self, *, flat: Tensor, views: dict[str, Tensor], runs: Sequence[Run]) -> None:
        """views: into `flat`, by parameter. runs: what goes where when it is finished."""
        self.flat = flat
        self.runs = tuple(runs)
        self._views = views
        self._touched: dict[str, bool] = {}

    @classmethod
    def of(cls, host: HostUnit, *, flat: Tensor) -> GradientSum:
        """Of a whole unit. flat: fp32 [at least layout.elems]."""
        layout = host.unit.layout
        flat = flat[: layout.elems]
        halves, bytes_ = slice(0, layout.bf16_elems), slice(0, layout.bf16_bytes)
        rest, rest_bytes = slice(layout.bf16_elems, layout.elems), slice(layout.bf16_bytes, layout.param_bytes)
        runs = [
            slab_run(host, flat[halves], dtype=torch.bfloat16, place=bytes_),
            slab_run(host, flat[rest], dtype=torch.float32, place=rest_bytes),
        ]
        return cls(flat=flat, views=layout.elem_views(flat), runs=runs)

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

    def add_rows(self, name: str, gradient: Tensor, *, first: int) -> None:
        """Add to rows `first` and on of a parameter."""
        self._views[name][first : first + gradient.shape[0]].add_(gradient)
        self._touched[name] = True

    def view(self, name: str) -> Tensor:
        """The sum of one parameter, for who writes it; say so with `touch`."""
        return self._views[name]

    def touch(self, name: str) -> None:
        """The parameter has a gradient."""
        self._touched[name] = True

    def touched(self, unit: Unit) -> tuple[bool, ...]:
        """Per parameter of `unit`, in layout order: whether any micro-batch gave it a gradient."""
        return tuple(self._touched[entry.name] for entry in unit.layout.params)

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
    """Staging buffers used in turn. A run larger than a buffer goes in pieces."""

    def __init__(self, device: Device, *, buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._ring = [
            Staging(f"staging{i}", block=device.buffer(buffer_bytes, dtype=torch.uint8), device=device)
            for i in range(buffers)
        ]
        self._next = 0
        self._buffer_bytes = buffer_bytes

    def offload(self, runs: Iterable[Run], *, unit: int) -> Event:
        """Send finished sums home. Returns the event "all is there"."""
        complete = self._device.event(f"slab{unit}.complete")
        for run in runs:
            for source, target in _pieces(run, most_bytes=self._buffer_bytes):
                self._send(run, source, target, unit=unit)
        self._device.record(complete, on=StreamName.SEND)
        return complete

    def _send(self, run: Run, source: Tensor, target: Tensor, *, unit: int) -> None:
        staging = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        self._device.wait(staging.offloaded, on=StreamName.COMPUTE, keeps="no refill before offload")
        self._device.touch(f"cast({unit})", on=StreamName.COMPUTE, writes=(staging.name,))
        block = staging.block[: target.numel()]
        block.view(run.dtype).copy_(source)
        self._device.record(staging.filled, on=StreamName.COMPUTE)
        self._device.wait(staging.filled, on=StreamName.SEND, keeps="no offload before fill")
        self._device.copy(target, source=block, on=StreamName.SEND, reads=staging.name, writes=run.writes)
        self._device.record(staging.offloaded, on=StreamName.SEND)

    def keep(self, runs: Iterable[Run]) -> None:
        """Cast the finished sum of a resident unit into its slab on the device: compute writes it, compute reads it."""
        for run in runs:
            run.target.view(run.dtype).copy_(run.source)


def _pieces(run: Run, *, most_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(source, target) of at most `most_bytes` each."""
    size = run.dtype.itemsize
    for start in range(0, run.source.numel(), most_bytes // size):
        source = run.source[start : start + most_bytes // size]
        yield source, run.target[start * size : (start + source.numel()) * size]
