"""A step while it runs, and how its numbers come home: in one page-locked block, read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.host.gradient import UnitGradient
from megatrain.model.batch import MicroBatch
from megatrain.stream.device import Device, Event, StreamName
from megatrain.stream.step import StepNumbers, StepParts

if TYPE_CHECKING:
    from megatrain.model.passes import Pass
    from megatrain.model.sliced_tail import SlicedTail


class RunningStep:
    """What one run of a plan holds: a pass, its current hidden state and gradient per micro-batch."""

    def __init__(self, batches: Sequence[MicroBatch], *, denominator: int) -> None:
        self.batches = tuple(batches)
        self.denominator = denominator
        self.passes: list[Pass] = []
        self.hidden: list[Tensor | None] = []
        self.gradient: list[Tensor | None] = [None] * len(batches)
        self.losses: list[Tensor] = []
        self.aux: Tensor | None = None
        self.tails: dict[int, SlicedTail] = {}  # by micro-batch, while a head in slices passes
        self.norms: dict[int, Tensor] = {}  # by unit: of its parameters' gradients, or of parts of them
        self.home: dict[int, UnitGradient] = {}
        self.numbers_home: Event | None = None
        self.stalls: list[tuple[Event, Event, float]] = []  # around an acquire; host seconds spent on the optimizer

    def hidden_of(self, m: int) -> Tensor:
        """The current hidden states of a micro-batch."""
        hidden = self.hidden[m]
        assert hidden is not None
        return hidden

    def add_norms(self, unit: int, norms: Tensor) -> None:
        """Note norms of parts of the unit's gradient: fp32 [parts]."""
        self.norms[unit] = torch.cat([self.norms[unit], norms]) if unit in self.norms else norms


class Numbers:
    """Loss, norm and router loss of a step, sent and read."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._block = device.host_buffer(3, dtype=torch.float32)

    def send(self, step: RunningStep) -> Event:
        """Enqueue them into the page-locked block; the event says that they are there."""
        norm = torch.linalg.vector_norm(torch.cat([step.norms[u] for u in sorted(step.norms)]))
        loss = step.losses[0]
        for more in step.losses[1:]:  # in the order of the micro-batches, as a resident run sums them
            loss = loss + more
        aux = torch.zeros_like(norm) if step.aux is None else step.aux.to(norm.dtype)
        numbers = torch.stack([loss.to(norm.dtype), norm, aux])
        home = self._device.event("numbers.home")
        # On the compute stream, so that they wait for nothing that the send stream waits for.
        self._device.copy(self._block, source=numbers, on=StreamName.COMPUTE, reads="sums", writes="numbers on host")
        self._device.record(home, on=StreamName.COMPUTE)
        step.passes.clear()
        return home

    def read(self, step: RunningStep) -> StepNumbers:
        """Waits for the device."""
        self._wait(step)
        self._device.touch("read numbers", on=StreamName.HOST, reads=("numbers on host",))
        loss, norm, aux = self._block.tolist()
        optimizer = transfer = 0.0
        for before, after, blocked in step.stalls:
            stalled = self._device.elapsed_s(before, end=after)
            optimizer += min(stalled, blocked)
            transfer += max(0.0, stalled - blocked)
        return StepNumbers(
            loss=loss,
            aux_loss=None if step.aux is None else aux,
            grad_norm=norm,
            exposed_transfer_s=transfer,
            exposed_optimizer_s=optimizer,
        )

    def read_parts(self, step: RunningStep) -> StepParts:
        """What the numbers are sums of. Waits for the device, several times."""
        self._wait(step)
        with self._device.computing():
            return StepParts(
                losses=tuple(loss.item() for loss in step.losses),
                unit_norms={unit: torch.linalg.vector_norm(norms).item() for unit, norms in step.norms.items()},
            )

    def _wait(self, step: RunningStep) -> None:
        assert step.numbers_home is not None
        self._device.host_wait(step.numbers_home, keeps="no read before it is home")
