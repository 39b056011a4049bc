"""Layers below their size: their experts in groups, each on the device only while micro-batches go through it.

In a layer's slot is the layer without its experts; two places of their own hold groups of them. The gradient of a group
is summed over the micro-batches in fp32 in the block that serves the layers' sums, and goes home before the next group
begins. On the host nothing changes: store, gradient slabs, optimizer and checkpoints know whole units.

A model whose experts are not divided has none of this: its layers are what a slot holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.model.layout import FlatLayout
from megatrain.stream.device import Device, Event, StreamName
from megatrain.stream.grads import GradientRing, GradientSum, slab_run
from megatrain.stream.ring import WeightSlot
from megatrain.stream.running import RunningStep
from megatrain.stream.schedule import Do, Op, Stay
from megatrain.stream.sources import HostBytes, Piece, Source

if TYPE_CHECKING:
    from megatrain.model.experts import ExpertGroups
    from megatrain.model.experts_pass import ExpertPass
    from megatrain.model.streamed import StreamedModel


class _GroupBytes:
    """A group's rows of every parameter of the experts, where its layout has them."""

    def __init__(self, host: HostUnit, *, groups: ExpertGroups, group: int) -> None:
        layout, span = groups.layouts[group], groups.spans[group]
        self.unit = host.unit.index
        self.nbytes = layout.nbytes
        self._pieces = [
            Piece(
                host.hi[host.unit.layout.entry(entry.name).rows(span.start, span.stop)],
                f"host{self.unit}",
                at=entry.byte_offset,
            )
            for entry in layout.params
        ]

    def pieces(self, *, loaded: Event) -> Iterator[Piece]:
        return iter(self._pieces)


class LayerParts:
    """What of the layers comes at once, and where their gradients are summed."""

    def __init__(self, model: StreamedModel, *, store: HostStore, device: Device, groups: int) -> None:
        """Divides the model's experts into at most so many groups; 0: not. Raises NotGroupable."""
        self._store, self._device = store, device
        self._groups = dict(enumerate(model.divide_experts(groups), start=1))
        self._sums: dict[Stay, GradientSum] = {}

    @property
    def counts(self) -> tuple[int, ...]:
        """Per layer the number of its groups; 0 where it comes whole."""
        return tuple(0 if groups is None else len(groups.spans) for groups in self._groups.values())

    def layout(self, unit: int) -> FlatLayout:
        """Of what a layer's slot holds."""
        groups = self._groups[unit]
        return self._store.units[unit].unit.layout if groups is None else groups.rest

    def sources(self) -> Mapping[Stay, Source]:
        """What slots are filled with, and the places of groups."""
        found: dict[Stay, Source] = {}
        for host in self._store.layers:
            unit, layout = host.unit.index, host.unit.layout
            groups = self._groups[unit]
            found[unit, None] = HostBytes(host, layout.around(*(groups.experts.names if groups else ())))
            for group in range(len(groups.spans) if groups else 0):
                assert groups is not None
                found[unit, group] = _GroupBytes(host, groups=groups, group=group)
        return found

    def _layouts(self) -> Iterator[FlatLayout]:
        for unit, groups in self._groups.items():
            yield self.layout(unit)
            yield from groups.layouts if groups else ()

    @property
    def elems(self) -> int:
        """Of the largest sum: of a layer, or of a group."""
        return max(layout.elems for layout in self._layouts())

    @property
    def param_bytes(self) -> int:
        """Of the largest gradient that goes home at once."""
        return max(layout.param_bytes for layout in self._layouts())

    def sums(self, flat: Tensor) -> dict[int, GradientSum]:
        """Of every layer. flat: fp32 [elems], for them and the groups in turn."""
        found = {}
        for host in self._store.layers:
            unit, groups = host.unit.index, self._groups[host.unit.index]
            if groups is None:
                found[unit] = GradientSum.of(host, flat=flat)
                continue
            layout = host.unit.layout
            found[unit] = _sum(
                host, groups.rest, flat, {e.name: layout.entry(e.name).bytes for e in groups.rest.params}
            )
            for group, (part, span) in enumerate(zip(groups.layouts, groups.spans, strict=True)):
                places = {e.name: layout.entry(e.name).rows(span.start, span.stop) for e in part.params}
                self._sums[unit, group] = _sum(host, part, flat, places)
        return found

    # -- operations -----------------------------------------------------------------------------------------

    def route(self, step: RunningStep, op: Op, slot: WeightSlot, *, hidden: Tensor) -> None:
        """Run a layer up to its experts; `reroute` also for the gradient of what they give."""
        m = op.micro_batch or 0
        reads = (slot.name, f"hidden{(op.unit, m)}") if op.do is Do.ROUTE else (slot.name,)
        self._device.touch(f"{op.do.value}({op.unit},{m})", on=StreamName.COMPUTE, reads=reads)
        weights = slot.views((op.unit, None), self.layout(op.unit))
        if op.do is Do.ROUTE:
            _pass(step, m).route(op.unit - 1, weights, hidden)
            return
        gradient = step.gradient[m]
        assert gradient is not None
        _pass(step, m).reroute(op.unit - 1, weights, hidden, gradient)

    def mix(self, step: RunningStep, op: Op, slot: WeightSlot) -> None:
        """Run a group of experts; `unmix` for gradients."""
        m, part, groups = op.micro_batch or 0, op.part, self._groups[op.unit]
        assert part is not None
        assert groups is not None
        self._device.touch(f"{op.do.value}({op.unit}/{part},{m})", on=StreamName.COMPUTE, reads=(slot.name,))
        tensors = slot.views((op.unit, part), groups.layouts[part])
        if op.do is Do.MIX:
            _pass(step, m).mix(op.unit - 1, part, tensors)
            return
        total = self._sums[op.unit, part]
        if m == 0:
            total.open()
        found = _pass(step, m).unmix(op.unit - 1, part, tensors)
        for entry, gradient in zip(groups.layouts[part].params, found, strict=True):
            total.add(entry.name, gradient)

    def offload(self, step: RunningStep, unit: int, part: int, *, gradients: GradientRing) -> None:
        """Send the gradient of a group home."""
        total = self._sums[unit, part]
        step.add_norms(unit, total.norms())
        gradients.offload(total.runs, unit=unit)

    def touch(self, unit: int, total: GradientSum) -> None:
        """Tell the sum of a layer that its experts have a gradient: whoever asks it asks for the whole unit."""
        groups = self._groups.get(unit)
        for name in groups.experts.names if groups else ():
            total.touch(name)


def _sum(host: HostUnit, layout: FlatLayout, flat: Tensor, places: Mapping[str, slice]) -> GradientSum:
    """places: bytes of the unit's slab, by parameter."""
    flat = flat[: layout.elems]
    views = layout.elem_views(flat)
    runs = [slab_run(host, views[e.name].flatten(), dtype=e.dtype, place=places[e.name]) for e in layout.params]
    return GradientSum(flat=flat, views=views, runs=runs)


def _pass(step: RunningStep, m: int) -> ExpertPass:
    """The executor made it of a model whose experts are divided."""
    return cast("ExpertPass", step.passes[m])
