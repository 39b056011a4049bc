"""Stem and tail below their size: the step's rows of the embedding, and the head slice by slice.

On the device are, of the stem, the rows that the step's tokens read (rows.py) and whatever else it has; of the tail,
all but the head's weight; and two slices of that weight, wherever it lives (in the stem when it is tied). On the host
nothing changes: store, gradient slabs, optimizer and checkpoints know whole units.

The gradient of a slice is summed over the micro-batches in fp32 in one block, and goes home before the next slice
begins. Tied, a row that the step's tokens read gets two gradients, and their sum must be made before it is rounded:
such rows move from the slice's sum to the sum of the embedding rows, where the embedding's own gradient joins them.
What the slice sends home for them is zero, and overwritten when the rows come home.

Letters: V rows of the head, D its width, U rows of the embedding in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.model.batch import MicroBatch
from megatrain.model.layout import ALIGN_ELEMS, Entry
from megatrain.model.sliced_tail import HeadSlice, SliceGradient
from megatrain.stream.device import Device, Event
from megatrain.stream.experts import LayerParts
from megatrain.stream.grads import GradientRing, GradientSum, Run, slab_run
from megatrain.stream.ring import WeightRing, WeightSlot
from megatrain.stream.rows import ROWS_ON_HOST, EmbeddingRows
from megatrain.stream.running import RunningStep
from megatrain.stream.schedule import Stay
from megatrain.stream.sources import HostBytes, Piece, Source
from megatrain.stream.step import Geometry, slice_rows

if TYPE_CHECKING:
    from megatrain.model.rows_and_slices import BoundSlices
    from megatrain.model.streamed import StreamedModel


class _StemSource:
    """What the stem has beside the embedding, then the step's rows of that."""

    def __init__(self, host: HostUnit, *, rows: EmbeddingRows, capacity_bytes: int) -> None:
        self.unit = host.unit.index
        self._rest = HostBytes(host, host.unit.layout.around(rows.entry.name))
        self._rows = rows
        self.nbytes = self._rest.nbytes + capacity_bytes

    def pieces(self, *, loaded: Event) -> Iterator[Piece]:
        yield from self._rest.pieces(loaded=loaded)
        yield Piece(self._rows.gather(fetched=loaded), ROWS_ON_HOST)


@dataclass(frozen=True)
class _Flats:
    """fp32 sums: of a layer; of a slice and, behind it, of the rest of the tail; of the rows, and the rest of the stem.

    One block where they are never needed at once.
    """

    layer: Tensor
    tail: Tensor
    stem: Tensor


class SlicedEnds:
    """The embedding as rows, the head in `parts` slices."""

    def __init__(
        self, model: StreamedModel, *, store: HostStore, device: Device, geometry: Geometry, layers: LayerParts
    ) -> None:
        """Takes sums and row block. Raises ValueError where the model has no such head."""
        slicing = model.slicing
        if slicing is None:
            raise ValueError("this model's head cannot be sliced")
        self._model, self._store, self._device, self._chunk = model, store, device, geometry.head_chunk
        self._tied, self._bias = slicing.tied, slicing.bias
        self._padding = slicing.padding
        self._tail = store.tail.unit.index
        self._owner = store.stem if self._tied else store.tail
        self._head: Entry = self._owner.unit.layout.entry(slicing.head.name)
        rows, height = slicing.head.rows, slice_rows(slicing.head.rows, slices=geometry.head_slices)
        self._height = height  # of every slice but the last, which may be lower
        self._spans = [slice(at, min(at + height, rows)) for at in range(0, rows, height)]
        self.parts = len(self._spans)
        entry = store.stem.unit.layout.entry(slicing.embedding.name)
        row_bytes = entry.nbytes // entry.shape[0]
        block = store.arena.take(geometry.embedding_rows * row_bytes, pinned=True)
        self._rows = EmbeddingRows(store.stem, name=entry.name, block=block, device=device, filled_by_others=self._tied)
        self._places: Tensor | None = None  # tied: where in its slice each row is, int64 [most rows], on the device
        self._stem_rest = store.stem.unit.layout.without(entry.name)
        in_tail = () if self._tied else (self._head.name,)
        self._tail_rest = store.tail.unit.layout.without(*in_tail)
        self._tail_bytes = store.tail.unit.layout.around(*in_tail)
        self._slices: BoundSlices | None = None
        self._allocate_sums(layers)

    def _allocate_sums(self, layers: LayerParts) -> None:
        store, height, width, rows = self._store, self._height, self._head.shape[1], self._rows.entry
        slice_elems = _aligned(height * width)
        row_elems = _aligned(self._rows.capacity * rows.shape[1])
        flats = self._flats(layers.elems, slice_elems + self._tail_rest.elems, row_elems + self._stem_rest.elems)
        self._slice_sum = flats.tail[: height * width].view(height, width)
        tail = flats.tail[slice_elems : slice_elems + self._tail_rest.elems]
        stem = flats.stem[: row_elems + self._stem_rest.elems]
        row_sums = stem[: self._rows.capacity * rows.shape[1]].view(-1, rows.shape[1])
        stem_views = self._stem_rest.elem_views(stem[row_elems:]) | {rows.name: row_sums}
        self.sums = layers.sums(flats.layer)
        self.sums[0] = GradientSum(flat=stem, views=stem_views, runs=self._rest_runs(store.stem, stem_views))
        tail_views = self._tail_rest.elem_views(tail)
        self.sums[self._tail] = GradientSum(flat=tail, views=tail_views, runs=self._rest_runs(store.tail, tail_views))

    def _flats(self, layer_elems: int, tail_elems: int, stem_elems: int) -> _Flats:
        apart = self._model.anatomy.stem_shared  # the rows' sum then lives from the loss to the end
        one = self._device.buffer(max(layer_elems, tail_elems, 0 if apart else stem_elems), dtype=torch.float32)
        return _Flats(one, one, self._device.buffer(stem_elems, dtype=torch.float32) if apart else one)

    def _rest_runs(self, host: HostUnit, views: Mapping[str, Tensor]) -> list[Run]:
        """The ways home of all parameters but the two that travel in rows."""
        gone = (self._head.name, self._rows.entry.name)
        return [
            slab_run(host, views[e.name].flatten(), dtype=e.dtype, place=e.bytes)
            for e in host.unit.layout.params
            if e.name not in gone
        ]

    # -- where things are -----------------------------------------------------------------------------------

    def sources(self) -> Mapping[Stay, Source]:
        tail = self._store.tail
        capacity = self._rows.capacity * self._rows.entry.nbytes // self._rows.entry.shape[0]
        found: dict[Stay, Source] = {
            (0, None): _StemSource(self._store.stem, rows=self._rows, capacity_bytes=capacity),
            (self._tail, None): HostBytes(tail, self._tail_bytes),
        }
        for part, span in enumerate(self._spans):
            found[self._tail, part] = HostBytes(self._owner, [self._head.rows(span.start, span.stop)])
        return found

    def bind(self, ring: WeightRing) -> None:
        stem = ring.block_of(0)
        rows = stem[self._stem_rest.nbytes :].view(self._rows.entry.dtype).view(-1, self._rows.entry.shape[1])
        self._slices = self._model.bind_sliced(
            stem=self._stem_rest.views(stem), tail=self._tail_rest.views(ring.block_of(self._tail)), rows=rows
        )

    def together(self, batches: Sequence[MicroBatch]) -> int:
        count = len(batches)
        while count > 1 and not self._rows.hold(batches[:count]):
            count -= 1
        return count

    def begin(self, step: RunningStep) -> None:
        """Decide the rows of the step, and tell the model."""
        assert self._slices is not None
        table = self._rows.choose(step.batches)
        self._slices.look_up(self._device.upload(table), padding=self._rows.row_of(self._padding))
        if self._tied:
            padded = torch.zeros(self._rows.capacity, dtype=torch.int64)  # one size, so that memory is reused
            padded[: len(self._rows.ids)] = self._rows.ids % self._height
            self._places = self._device.upload(padded)

    # -- operations -----------------------------------------------------------------------------------------

    def measure(self, step: RunningStep, m: int, *, part: int, slot: WeightSlot) -> None:
        if part == 0:
            tail = step.passes[m].sliced_tail(step.hidden_of(m), denominator=step.denominator, chunk=self._chunk)
            step.tails[m], step.hidden[m] = tail, None
        step.tails[m].measure(self._piece(part, slot))

    def loss(self, step: RunningStep, m: int, *, training: bool) -> None:
        step.losses.append(step.tails[m].loss())
        if not training:
            del step.tails[m]

    def differentiate(self, step: RunningStep, m: int, *, part: int, slot: WeightSlot) -> None:
        if m == 0:
            if part == self.parts - 1:
                self.sums[self._tail].open()
            self._slice_sum.zero_()
        step.tails[m].differentiate(
            self._piece(part, slot),
            accumulate=self.accumulate,
            accumulate_slice=partial(self._add_slice, part=part),
        )
        if part == 0:
            step.gradient[m] = step.tails.pop(m).hidden_grad()

    def offload_part(self, step: RunningStep, part: int, *, gradients: GradientRing) -> None:
        span = self._spans[part]
        total = self._slice_sum[: span.stop - span.start]
        if self._tied:
            self._move_rows(total, span=span)
        unit = self._owner.unit.index
        step.add_norms(unit, torch.linalg.vector_norm(total).view(1))
        place = self._head.rows(span.start, span.stop)
        run = slab_run(self._owner, total.flatten(), dtype=self._head.dtype, place=place)
        gradients.offload([run], unit=unit)

    def accumulate(self, name: str, gradient: Tensor) -> None:
        where, _, entry = name.partition(":")
        self.sums[0 if where == "stem" else self._tail].add(entry, gradient)

    def runs(self, unit: int) -> tuple[Run, ...]:
        found = self.sums[unit].runs
        return found if unit else (*found, self._rows.run(self.sums[0].view(self._rows.entry.name)))

    def touched(self, unit: int) -> tuple[bool, ...]:
        if unit == self._tail and not self._tied:
            self.sums[unit].touch(self._head.name)
        return self.sums[unit].touched(self._store.units[unit].unit)

    def arrival(self, unit: int, *, home: Event) -> Callable[[], None]:
        if unit == 0:
            return self._rows.scatter(home=home)
        return partial(self._device.host_wait, home, keeps="no update before the gradient is home")

    def _piece(self, part: int, slot: WeightSlot) -> HeadSlice:
        assert self._slices is not None
        span, width = self._spans[part], self._head.shape[1]
        nbytes = (span.stop - span.start) * width * self._head.dtype.itemsize
        return self._slices.slice_at(span.start, slot.block[:nbytes].view(self._head.dtype).view(-1, width))

    def _add_slice(self, gradient: SliceGradient, *, part: int) -> None:
        self._slice_sum[: gradient.weight.shape[0]].add_(gradient.weight)
        if self._bias is not None and gradient.bias is not None:
            in_stem = any(e.name == self._bias.name for e in self._store.stem.unit.layout.params)
            total = self.sums[0 if in_stem else self._tail]
            total.add_rows(self._bias.name, gradient.bias, first=self._spans[part].start)

    def _move_rows(self, total: Tensor, *, span: slice) -> None:
        """Tied: from the slice's sum [v, D] to the rows' sum, before either is rounded."""
        mine = self._rows.span(span.start, span.stop)
        name = self._rows.entry.name
        self.sums[0].touch(name)
        if mine.start == mine.stop:
            return
        assert self._places is not None
        places = self._places[mine]
        torch.index_select(total, 0, places, out=self.sums[0].view(name)[mine])
        total.index_fill_(0, places, 0.0)


def _aligned(elems: int) -> int:
    return -(-elems // ALIGN_ELEMS) * ALIGN_ELEMS
