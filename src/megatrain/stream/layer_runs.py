"""A layer at a micro-batch, forward and backward, and what waits between the two: inputs, and what attention gave.

A layer whose experts come in groups is run here as well, in the steps before and behind them; the groups are in
experts.py. A layer whose graph is kept has nothing that waits: the graph holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.host.store import HostStore
from megatrain.stream.activations import ActivationStore, DeviceActivations, HostActivations
from megatrain.stream.attention import KeptAttention
from megatrain.stream.device import Device, StreamName
from megatrain.stream.ends import Ends
from megatrain.stream.experts import LayerParts
from megatrain.stream.ring import WeightSlot
from megatrain.stream.running import RunningStep
from megatrain.stream.schedule import Op
from megatrain.stream.step import Geometry

if TYPE_CHECKING:
    from megatrain.model.streamed import StreamedModel


class LayerRuns:
    """Runs layers in slots that compute has acquired. Takes what waits on the host from the arena."""

    def __init__(
        self,
        model: StreamedModel,
        *,
        store: HostStore,
        device: Device,
        geometry: Geometry,
        parts: LayerParts,
        ends: Ends,
    ) -> None:
        self._model, self._device, self._parts, self._ends = model, device, parts, ends
        self._inputs_on_host = bool(geometry.load_buffers)
        self._first_kept = store.tail.unit.index - geometry.kept
        self._activations = _inputs(geometry, store=store, device=device)
        layers = sorted(index + 1 for index in model.attention_layers)
        self._attention = KeptAttention.of(geometry, device=device, arena=store.arena, layers=layers)

    def computed(self, unit: int, m: int) -> None:
        """The work enqueued so far has computed the input of that unit."""
        self._activations.computed((unit, m))

    def save(self, step: RunningStep, unit: int, m: int) -> None:
        """Keep the input of a layer where the schedule says so: it waits on the host."""
        self._activations.save((unit, m), step.hidden_of(m))

    def load(self, unit: int, m: int) -> None:
        """Begin to bring back what waits on the host."""
        if self._inputs_on_host:
            self._activations.load((unit, m))
        self._attention.load((unit, m))

    def forward(
        self,
        step: RunningStep,
        unit: int,
        m: int,
        *,
        slot: WeightSlot,
        training: bool = False,
        keep_graph: bool = False,
    ) -> None:
        """training: what the backward needs is kept, so far as it is not recomputed; a kept graph holds it itself."""
        key, one = (unit, m), step.passes[m]
        weights, hidden = slot.views((unit, None), self._parts.layout(unit)), step.hidden_of(m)
        if training and not self._inputs_on_host:
            self._activations.save(key, hidden)
        attention = training and self._attention.on and unit - 1 in self._model.attention_layers
        writes = (f"hidden{(unit + 1, m)}", *((f"attention{key}",) if attention else ()))
        reads = (slot.name, f"hidden{key}")
        self._device.touch(f"forward({unit},{m})", on=StreamName.COMPUTE, reads=reads, writes=writes)
        out = one.forward(unit - 1, weights, hidden, keep_graph=keep_graph, keep_attention=attention)
        step.hidden[m] = out.contiguous()
        self.computed(unit + 1, m)
        if attention:
            self._attention.save(key, one.take_attention(unit - 1))

    def route(self, step: RunningStep, op: Op, m: int, *, slot: WeightSlot) -> None:
        """Run a layer up to its experts."""
        self._parts.route(step, op, slot, hidden=step.hidden_of(m))

    def reroute(self, step: RunningStep, op: Op, m: int, *, slot: WeightSlot) -> None:
        """The same in the backward, from the input that waited and goes on waiting."""
        key = (op.unit, m)
        self._parts.route(step, op, slot, hidden=self._activations.take(key)[0])
        self._activations.put_back(key)

    def backward(self, step: RunningStep, unit: int, m: int, *, slot: WeightSlot) -> None:
        """Differentiate a layer, recomputed unless its graph was kept; the gradients go into the sums."""
        layout, total = self._parts.layout(unit), self._ends.sums[unit]
        if m == 0:
            total.open()
        gradient = step.gradient[m]
        assert gradient is not None
        self._device.touch(f"backward({unit},{m})", on=StreamName.COMPUTE, reads=(slot.name,))
        kept = unit >= self._first_kept
        hidden = None if kept else self._activations.take((unit, m))[0]
        step.gradient[m], own = step.passes[m].backward(
            unit - 1,
            slot.views((unit, None), layout),
            hidden,
            gradient,
            accumulate=self._ends.accumulate,
            attention=self._attention.take((unit, m)),
        )
        if not kept:
            self._activations.drop((unit, m))
        self._attention.drop((unit, m))
        for entry, value in zip(layout.params, own, strict=True):
            if value is not None:
                total.add(entry.name, value)


def _inputs(geometry: Geometry, *, store: HostStore, device: Device) -> ActivationStore:
    """Where the layers' inputs wait, as the geometry says."""
    if not geometry.load_buffers:
        return DeviceActivations()
    rows = {
        (layer.unit.index, m): store.arena.take(geometry.input_bytes, pinned=True)
        for layer in store.layers
        for m in range(geometry.micro_batches)
    }
    return HostActivations(device, rows=rows, places=geometry.load_buffers)
