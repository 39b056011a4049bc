"""The one interpreter of a step: CPU or CUDA, training or evaluation.

It enqueues the operations of a plan (stream/schedule.py) in order and never waits for the device inside a
step. The numbers of the step (loss, norm) come back in one page-locked block that `StepOutput.result` waits for.

Letters: M micro-batches of a step; a micro-batch's hidden states are [B, S, D] for most models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.host.gradient import UnitGradient
from megatrain.host.store import HostStore
from megatrain.model.batch import MicroBatch
from megatrain.stream.activations import ActivationStore, DeviceActivations, HostActivations
from megatrain.stream.device import Device, StreamName
from megatrain.stream.grads import GradientRing, GradientSum
from megatrain.stream.resident import ResidentUnits
from megatrain.stream.ring import Updates, WeightRing
from megatrain.stream.running import Numbers, RunningStep
from megatrain.stream.schedule import Do, Op, StepShape, check, plan_step
from megatrain.stream.step import Geometry, StepOutput

if TYPE_CHECKING:
    from megatrain.model.streamed import StreamedModel


class StreamingExecutor:
    """Runs micro-batches through a model whose layers live in the host store.

    A step that raises (an interrupt, no memory) leaves slots in use: the executor then refuses every further one.
    """

    def __init__(
        self,
        model: StreamedModel,
        *,
        store: HostStore,
        device: Device,
        geometry: Geometry,
        updates: Updates,
        poison: bool = False,
    ) -> None:
        """Allocates everything a step needs. `poison`: fill slots with NaN on release (tests)."""
        self._model, self._store, self._device, self._geometry = model, store, device, geometry
        self._resident = ResidentUnits(store, device=device, count=geometry.resident)
        self._ring = WeightRing(
            store,
            device=device,
            slots=geometry.slots,
            updates=updates,
            resident=self._resident.units,
            poison=poison,
        )
        largest = max(layer.unit.layout.param_bytes for layer in store.layers)
        streaming = len(self._resident.units) < len(store.units)
        self._gradients = GradientRing(device, buffers=geometry.grad_buffers if streaming else 0, buffer_bytes=largest)
        self._sums = self._allocate_sums()
        self._activations = self._allocate_activations()
        self._numbers = Numbers(device)
        self._tail = store.tail.unit.index
        model.outer_buffers_to(device.torch_device)
        stem, tail = store.stem.unit.layout, store.tail.unit.layout
        model.bind_outer(stem=stem.views(self._ring.block_of(0)), tail=tail.views(self._ring.block_of(self._tail)))
        self._plan = cache(self._make_plan)

    def _allocate_sums(self) -> dict[int, GradientSum]:
        """One fp32 block for the layers, one for the tail; the stem's own only where both live at once."""
        layer_flat = self._device.buffer(max(x.unit.layout.elems for x in self._store.layers), dtype=torch.float32)
        stem, tail = self._store.stem, self._store.tail
        apart = self._model.anatomy.stem_shared
        sizes = (stem.unit.layout.elems, tail.unit.layout.elems)
        tail_flat = self._device.buffer(sizes[1] if apart else max(sizes), dtype=torch.float32)
        stem_flat = self._device.buffer(sizes[0], dtype=torch.float32) if apart else tail_flat
        flats = {x.unit.index: layer_flat for x in self._store.layers}
        flats |= {stem.unit.index: stem_flat, tail.unit.index: tail_flat}
        resident = self._resident.units
        return {
            x.unit.index: GradientSum(resident.get(x.unit.index, x), flat=flats[x.unit.index])
            for x in self._store.units
        }

    def _allocate_activations(self) -> ActivationStore:
        geometry = self._geometry
        if not geometry.load_buffers:
            return DeviceActivations()
        rows = {
            (layer.unit.index, m): self._store.arena.take(geometry.input_bytes, pinned=True)
            for layer in self._store.layers
            for m in range(geometry.micro_batches)
        }
        return HostActivations(self._device, rows=rows, places=geometry.load_buffers)

    def _make_plan(self, micro_batches: int, train: bool) -> tuple[Op, ...]:
        shape = StepShape(
            layers=len(self._store.layers),
            micro_batches=micro_batches,
            slots=self._geometry.slots,
            load_buffers=self._geometry.load_buffers,
            train=train,
            resident=self._geometry.resident,
            kept=self._geometry.kept,
        )
        plan = plan_step(shape)
        check(plan, shape)
        return plan

    # -- the two things it can do -------------------------------------------------------------------------

    def train_step(self, batches: Sequence[MicroBatch], *, seed: int) -> StepOutput:
        """Enqueue forward, loss and backward of one step. `seed` fixes dropout."""
        if len(batches) > self._geometry.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches; planned for {self._geometry.micro_batches}")
        self._resident.load()
        self._device.rng.seed(seed)
        step = RunningStep(batches, denominator=sum(b.supervised for b in batches))
        self._ring.blocked_s = 0.0
        if self._model.anatomy.stem_shared:
            self._sums[0].open()
        self._run(self._plan(len(batches), True), step)
        order = sorted(step.home)
        return StepOutput(
            tuple(step.home[u] for u in order),
            partial(self._numbers.read, step),
            partial(self._numbers.read_parts, step),
        )

    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """(summed cross-entropy, supervised tokens) of any number of micro-batches, without dropout."""
        self._resident.load()
        total, width = 0.0, self._geometry.micro_batches
        for first in range(0, len(batches), width):
            group = batches[first : first + width]
            step = RunningStep(group, denominator=1)
            self._run(self._plan(len(group), False), step)
            total += float(torch.stack(step.losses).sum(dtype=torch.float64))
        return total, sum(b.supervised for b in batches)

    def bring_home(self) -> None:
        """Make the host store hold what is resident on the device; no step may be running, updates may."""
        self._resident.bring_home()

    def _run(self, plan: Sequence[Op], step: RunningStep) -> None:
        training = any(op.do is Do.BACKWARD for op in plan)
        with self._device.computing():
            for op in plan:
                self._ring.start_updated()
                self._do(op, step, training=training)

    def _do(self, op: Op, step: RunningStep, *, training: bool) -> None:
        m = op.micro_batch or 0
        match op.do:
            case Do.FETCH:
                self._ring.prefetch(op.unit)
            case Do.FREE:
                self._ring.release(op.unit)
            case Do.EMBED:
                self._embed(step, m, training=training)
            case Do.SAVE:
                self._activations.save((op.unit, m), self._hidden(step, m))
            case Do.FORWARD:
                self._forward(step, op.unit, m, save=training and not self._geometry.load_buffers)
            case Do.KEEP:
                self._forward(step, op.unit, m, keep_graph=True)
            case Do.AUX:
                step.aux = self._model.aux_loss(step.passes, grad=True)
            case Do.LOSS:
                self._loss(step, m, training=training)
            case Do.LOAD:
                self._activations.load((op.unit, m))
            case Do.BACKWARD:
                self._backward(step, op.unit, m)
            case Do.UNEMBED:
                self._unembed(step, m)
            case Do.OFFLOAD:
                self._offload(step, op.unit)

    def _upload(self, batch: MicroBatch) -> MicroBatch:
        move = self._device.upload
        return replace(
            batch,
            input_ids=move(batch.input_ids),
            labels=move(batch.labels),
            position_ids=None if batch.position_ids is None else move(batch.position_ids),
            attention_mask=None if batch.attention_mask is None else move(batch.attention_mask),
        )

    # -- operations ---------------------------------------------------------------------------------------

    def _acquire(self, step: RunningStep, unit: int) -> dict[str, Tensor]:
        slot = self._ring.holder(unit)
        if slot.in_use:
            return slot.views(unit, self._store)
        before, blocked = self._device.mark(on=StreamName.COMPUTE), self._ring.blocked_s
        weights = self._ring.acquire(unit)
        after = self._device.mark(on=StreamName.COMPUTE)
        step.stalls.append((before, after, self._ring.blocked_s - blocked))
        return weights

    @staticmethod
    def _hidden(step: RunningStep, m: int) -> Tensor:
        hidden = step.hidden[m]
        assert hidden is not None
        return hidden

    def _embed(self, step: RunningStep, m: int, *, training: bool) -> None:
        self._acquire(step, 0)
        self._device.touch(f"embed({m})", on=StreamName.COMPUTE, reads=("stem",), writes=(f"hidden{(1, m)}",))
        batch = step.batches[m]
        documents = self._model.documents(batch)
        one = self._model.begin(self._upload(batch), grad=training, documents=documents)
        step.passes.append(one)
        step.hidden.append(one.hidden.contiguous())
        self._activations.computed((1, m))

    def _forward(self, step: RunningStep, unit: int, m: int, *, save: bool = False, keep_graph: bool = False) -> None:
        weights = self._acquire(step, unit)
        hidden = self._hidden(step, m)
        if save:
            self._activations.save((unit, m), hidden)
        self._device.touch(
            f"forward({unit},{m})",
            on=StreamName.COMPUTE,
            reads=(self._ring.holder(unit).name, f"hidden{(unit, m)}"),
            writes=(f"hidden{(unit + 1, m)}",),
        )
        step.hidden[m] = step.passes[m].forward(unit - 1, weights, hidden, keep_graph=keep_graph).contiguous()
        self._activations.computed((unit + 1, m))

    def _loss(self, step: RunningStep, m: int, *, training: bool) -> None:
        self._acquire(step, self._tail)
        if training and m == 0:
            self._sums[self._tail].open()
        self._device.touch(f"loss({m})", on=StreamName.COMPUTE, reads=("tail", "stem", f"hidden{(self._tail, m)}"))
        result = step.passes[m].tail(
            self._hidden(step, m),
            denominator=step.denominator,
            chunk=self._geometry.head_chunk,
            grad=training,
            accumulate=self._accumulate,
        )
        step.losses.append(result.loss)
        step.hidden[m], step.gradient[m] = None, result.hidden_grad

    def _backward(self, step: RunningStep, unit: int, m: int) -> None:
        weights = self._acquire(step, unit)
        total = self._sums[unit]
        if m == 0:
            total.open()
        gradient = step.gradient[m]
        assert gradient is not None
        self._device.touch(f"backward({unit},{m})", on=StreamName.COMPUTE, reads=(self._ring.holder(unit).name,))
        kept = unit >= self._tail - self._geometry.kept
        hidden = None if kept else self._activations.take((unit, m))
        step.gradient[m], own = step.passes[m].backward(
            unit - 1, weights, hidden, gradient, accumulate=self._accumulate
        )
        if not kept:
            self._activations.drop((unit, m))
        for entry, value in zip(total.unit.unit.layout.params, own, strict=True):
            if value is not None:
                total.add(entry.name, value)

    def _unembed(self, step: RunningStep, m: int) -> None:
        if m == 0 and not self._model.anatomy.stem_shared:
            self._sums[0].open()
        gradient = step.gradient[m]
        assert gradient is not None
        self._device.touch(f"unembed({m})", on=StreamName.COMPUTE, reads=("stem",))
        step.passes[m].finish(gradient, accumulate=self._accumulate)
        step.gradient[m] = None

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of an outer tensor, named "stem:..." or "tail:..."."""
        part, _, entry = name.partition(":")
        self._sums[0 if part == "stem" else self._tail].add(entry, gradient)

    def _offload(self, step: RunningStep, unit: int) -> None:
        total = self._sums[unit]
        step.norms[unit] = total.norms()
        if unit == 0:  # the last one: before its slab, so that loss and norm do not queue behind it on the link
            step.numbers_home = self._numbers.send(step)
        if unit in self._resident.units:
            self._gradients.keep(total)
            step.home[unit] = UnitGradient(unit, _at_once, total.touched, resident=self._resident.units[unit])
            return
        complete = self._gradients.offload(total)
        wait = partial(self._device.host_wait, complete, keeps="no update before the gradient is home")
        step.home[unit] = UnitGradient(unit, wait, total.touched)


def _at_once() -> None:
    """The wait for a gradient that compute has before it updates with it."""
