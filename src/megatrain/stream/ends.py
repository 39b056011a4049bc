"""Stem and tail on the device, as a step sees them: what fills their places, where gradients are summed, the loss.

`WholeEnds` keeps each in one piece. `SlicedEnds` (sliced.py) brings only the rows of the embedding that a step reads,
and the head in slices. The executor is the same for both: what one of them has no part in is a documented no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.model.batch import MicroBatch
from megatrain.stream.device import Device, Event
from megatrain.stream.experts import LayerParts
from megatrain.stream.grads import GradientRing, GradientSum, Run
from megatrain.stream.ring import WeightRing, WeightSlot
from megatrain.stream.running import RunningStep
from megatrain.stream.schedule import Stay
from megatrain.stream.sources import HostBytes, Source
from megatrain.stream.step import Geometry

if TYPE_CHECKING:
    from megatrain.model.streamed import StreamedModel


class Ends(Protocol):
    """Both ends of the model, and the gradient sums of all units."""

    @property
    def sums(self) -> Mapping[int, GradientSum]:
        """Of every unit, by its index; those of stem and tail may be of parts."""

    @property
    def parts(self) -> int:
        """Slices of the head; 0: it comes with the tail."""

    def sources(self) -> Mapping[Stay, Source]:
        """What fills the places of the ends that stream."""

    def bind(self, ring: WeightRing) -> None:
        """Tell the model where its outer tensors are."""

    def together(self, batches: Sequence[MicroBatch]) -> int:
        """How many of the first of them can be evaluated in one go."""

    def begin(self, step: RunningStep) -> None:
        """Before the first operation of a step or an evaluation."""

    def measure(self, step: RunningStep, m: int, *, part: int, slot: WeightSlot) -> None:
        """A slice of the head at a micro-batch, for the loss. Whole: never called."""

    def loss(self, step: RunningStep, m: int, *, training: bool) -> None:
        """The loss of a micro-batch, and (whole, training) the gradient of its hidden states."""

    def differentiate(self, step: RunningStep, m: int, *, part: int, slot: WeightSlot) -> None:
        """A slice again, for gradients; after the last one that of the hidden states. Whole: never called."""

    def offload_part(self, step: RunningStep, part: int, *, gradients: GradientRing) -> None:
        """Send the gradient of a slice home. Whole: never called."""

    def accumulate(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of an outer tensor, named "stem:..." or "tail:..."."""

    def runs(self, unit: int) -> tuple[Run, ...]:
        """What is to go where of a unit's finished sums."""

    def touched(self, unit: int) -> tuple[bool, ...]:
        """Per parameter of the unit, in layout order: whether any micro-batch gave it a gradient."""

    def arrival(self, unit: int, *, home: Event) -> Callable[[], None]:
        """What the optimizer's thread waits with before it updates the unit. home: all runs are there."""


class WholeEnds:
    """Stem and tail each in one piece, in a place of its own or resident."""

    parts = 0

    def __init__(
        self,
        model: StreamedModel,
        *,
        store: HostStore,
        device: Device,
        geometry: Geometry,
        layers: LayerParts,
        resident: Mapping[int, HostUnit],
    ) -> None:
        self._model, self._store, self._device, self._chunk = model, store, device, geometry.head_chunk
        self._tail = store.tail.unit.index
        self._resident = resident
        self.sums = self._allocate_sums(layers)

    def _allocate_sums(self, layers: LayerParts) -> dict[int, GradientSum]:
        """One fp32 block for the layers, one for the tail; the stem's own only where both live at once."""
        store, resident = self._store, self._resident
        layer_flat = self._device.buffer(layers.elems, dtype=torch.float32)
        apart = self._model.anatomy.stem_shared
        sizes = (store.stem.unit.layout.elems, store.tail.unit.layout.elems)
        tail_flat = self._device.buffer(sizes[1] if apart else max(sizes), dtype=torch.float32)
        stem_flat = self._device.buffer(sizes[0], dtype=torch.float32) if apart else tail_flat
        stay = [x for x in resident.values() if 0 < x.unit.index < self._tail]
        ends = {0: (store.stem, stem_flat), self._tail: (store.tail, tail_flat)}
        return {
            **layers.sums(layer_flat),
            **{x.unit.index: GradientSum.of(x, flat=layer_flat) for x in stay},
            **{unit: GradientSum.of(resident.get(unit, host), flat=flat) for unit, (host, flat) in ends.items()},
        }

    def sources(self) -> Mapping[Stay, Source]:
        ends = (self._store.stem, self._store.tail)
        return {(x.unit.index, None): HostBytes.whole(x) for x in ends if x.unit.index not in self._resident}

    def bind(self, ring: WeightRing) -> None:
        stem, tail = self._store.stem.unit.layout, self._store.tail.unit.layout
        self._model.bind_outer(stem=stem.views(ring.block_of(0)), tail=tail.views(ring.block_of(self._tail)))

    def together(self, batches: Sequence[MicroBatch]) -> int:
        return len(batches)

    def begin(self, step: RunningStep) -> None:
        """Nothing: whole units do not depend on the step."""

    def measure(self, step: RunningStep, m: int, *, part: int, slot: WeightSlot) -> None:
        raise AssertionError("the head is whole")

    def loss(self, step: RunningStep, m: int, *, training: bool) -> None:
        if training and m == 0:
            self.sums[self._tail].open()
        result = step.passes[m].tail(
            step.hidden_of(m),
            denominator=step.denominator,
            chunk=self._chunk,
            grad=training,
            accumulate=self.accumulate,
        )
        step.losses.append(result.loss)
        step.hidden[m], step.gradient[m] = None, result.hidden_grad

    def differentiate(self, step: RunningStep, m: int, *, part: int, slot: WeightSlot) -> None:
        raise AssertionError("the head is whole")

    def offload_part(self, step: RunningStep, part: int, *, gradients: GradientRing) -> None:
        raise AssertionError("the head is whole")

    def accumulate(self, name: str, gradient: Tensor) -> None:
        where, _, entry = name.partition(":")
        self.sums[0 if where == "stem" else self._tail].add(entry, gradient)

    def runs(self, unit: int) -> tuple[Run, ...]:
        return self.sums[unit].runs

    def touched(self, unit: int) -> tuple[bool, ...]:
        return self.sums[unit].touched(self._store.units[unit].unit)

    def arrival(self, unit: int, *, home: Event) -> Callable[[], None]:
        return partial(self._device.host_wait, home, keeps="no update before the gradient is home")
