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

from megatrain.host.gradient import UnitGradient
from megatrain.host.store import HostStore
from megatrain.model.batch import MicroBatch
from megatrain.stream.device import Device, StreamName
from megatrain.stream.ends import Ends, WholeEnds
from megatrain.stream.experts import LayerParts
from megatrain.stream.grads import GradientRing
from megatrain.stream.layer_runs import LayerRuns
from megatrain.stream.resident import ResidentUnits
from megatrain.stream.ring import Updates, WeightRing, WeightSlot
from megatrain.stream.running import Numbers, RunningStep
from megatrain.stream.schedule import Do, Op, StepShape, plan_step
from megatrain.stream.schedule_check import check
from megatrain.stream.sliced import SlicedEnds
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
        self._layers = LayerParts(model, store=store, device=device, groups=geometry.expert_groups)
        model.tile_mlps(geometry.tile_tokens)
        self._ends = self._make_ends()
        self._sums = self._ends.sums
        self._ring = WeightRing(
            store,
            device=device,
            slots=geometry.slots,
            updates=updates,
            layers=self._layers.sources(),
            ends=self._ends.sources(),
            resident=self._resident.units,
            poison=poison,
        )
        buffers = geometry.grad_buffers if len(self._resident.units) < len(store.units) else 0
        self._gradients = GradientRing(device, buffers=buffers, buffer_bytes=self._layers.param_bytes)
        self._layer_runs = LayerRuns(
            model, store=store, device=device, geometry=geometry, parts=self._layers, ends=self._ends
        )
        self._numbers = Numbers(device)
        self._tail = store.tail.unit.index
        model.outer_buffers_to(device.torch_device)
        self._ends.bind(self._ring)
        self._plan = cache(self._make_plan)

    def _make_ends(self) -> Ends:
        model, store, device, geometry = self._model, self._store, self._device, self._geometry
        layers = self._layers
        if not geometry.head_slices:
            resident = self._resident.units
            return WholeEnds(model, store=store, device=device, geometry=geometry, layers=layers, resident=resident)
        if geometry.resident:
            raise ValueError("a head in slices needs all units to stream")
        return SlicedEnds(model, store=store, device=device, geometry=geometry, layers=layers)

    def _make_plan(self, micro_batches: int, train: bool) -> tuple[Op, ...]:
        shape = StepShape(
            layers=len(self._store.layers),
            micro_batches=micro_batches,
            slots=self._geometry.slots,
            load_buffers=self._geometry.load_buffers,
            train=train,
            resident=self._geometry.resident,
            kept=self._geometry.kept,
            attention_buffers=self._geometry.attention_buffers,
            head_slices=self._ends.parts,
            expert_groups=self._layers.counts,
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
        total, width, rest = 0.0, self._geometry.micro_batches, list(batches)
        while rest:
            count = self._ends.together(rest[:width])
            group, rest = rest[:count], rest[count:]
            step = RunningStep(group, denominator=1)
            self._run(self._plan(len(group), False), step)
            total += float(torch.stack(step.losses).sum(dtype=torch.float64))
        return total, sum(b.supervised for b in batches)

    def bring_home(self) -> None:
        """Make the host store hold what is resident on the device; no step may be running, updates may."""
        self._resident.bring_home()

    def close(self) -> None:
        """Give the device's memory back; nothing can run here any more."""
        self._model.unbind_outer()
        del self._resident, self._layers, self._ends, self._sums, self._ring, self._gradients, self._layer_runs

    def _run(self, plan: Sequence[Op], step: RunningStep) -> None:
        training = any(op.do is Do.BACKWARD for op in plan)
        self._ends.begin(step)
        with self._device.computing():
            for op in plan:
                self._ring.start_updated()
                self._do(op, step, training=training)

    def _do(self, op: Op, step: RunningStep, *, training: bool) -> None:
        m = op.micro_batch or 0
        match op.do:
            case Do.FETCH:
                self._ring.prefetch(op.unit, op.part)
            case Do.FREE:
                self._ring.release(op.unit, op.part)
            case Do.EMBED:
                self._embed(step, m, training=training)
            case Do.SAVE:
                self._layer_runs.save(step, op.unit, m)
            case Do.ROUTE:
                self._layer_runs.route(step, op, m, slot=self._acquire(step, op.unit))
            case Do.REROUTE:
                self._layer_runs.reroute(step, op, m, slot=self._acquire(step, op.unit))
            case Do.MIX | Do.UNMIX:
                self._layers.mix(step, op, self._acquire(step, op.unit, op.part))
            case Do.FORWARD:
                self._layer_runs.forward(step, op.unit, m, slot=self._acquire(step, op.unit), training=training)
            case Do.KEEP:
                self._layer_runs.forward(step, op.unit, m, slot=self._acquire(step, op.unit), keep_graph=True)
            case Do.AUX:
                step.aux = self._model.aux_loss(step.passes, grad=True)
            case Do.LSE | Do.SLOPE:
                self._slice(step, op, m)
            case Do.LOSS:
                self._loss(step, m, training=training)
            case Do.LOAD:
                self._layer_runs.load(op.unit, m)
            case Do.BACKWARD:
                self._layer_runs.backward(step, op.unit, m, slot=self._acquire(step, op.unit))
            case Do.UNEMBED:
                self._unembed(step, m)
            case Do.OFFLOAD if op.part is not None and op.unit != self._tail:
                self._layers.offload(step, op.unit, op.part, gradients=self._gradients)
            case Do.OFFLOAD if op.part is not None:
                self._ends.offload_part(step, op.part, gradients=self._gradients)
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

    def _acquire(self, step: RunningStep, unit: int, part: int | None = None) -> WeightSlot:
        slot = self._ring.holder(unit, part)
        if slot.in_use:
            return slot
        before, blocked = self._device.mark(on=StreamName.COMPUTE), self._ring.blocked_s
        self._ring.acquire(unit, part)
        after = self._device.mark(on=StreamName.COMPUTE)
        step.stalls.append((before, after, self._ring.blocked_s - blocked))
        return slot

    def _embed(self, step: RunningStep, m: int, *, training: bool) -> None:
        self._acquire(step, 0)
        self._device.touch(f"embed({m})", on=StreamName.COMPUTE, reads=("stem",), writes=(f"hidden{(1, m)}",))
        batch = step.batches[m]
        documents = self._model.documents(batch)
        one = self._model.begin(self._upload(batch), grad=training, documents=documents)
        step.passes.append(one)
        step.hidden.append(one.hidden.contiguous())
        self._layer_runs.computed(1, m)

    def _loss(self, step: RunningStep, m: int, *, training: bool) -> None:
        self._acquire(step, self._tail)
        self._device.touch(f"loss({m})", on=StreamName.COMPUTE, reads=("tail", "stem", f"hidden{(self._tail, m)}"))
        self._ends.loss(step, m, training=training)

    def _slice(self, step: RunningStep, op: Op, m: int) -> None:
        assert op.part is not None
        slot = self._acquire(step, op.unit, op.part)
        self._acquire(step, op.unit)  # fetched before the slice, so there is nothing left to wait for
        reads = ("tail", "stem", slot.name, f"hidden{(op.unit, m)}")
        self._device.touch(f"{op.do.value}({op.part},{m})", on=StreamName.COMPUTE, reads=reads)
        see = self._ends.measure if op.do is Do.LSE else self._ends.differentiate
        see(step, m, part=op.part, slot=slot)

    def _unembed(self, step: RunningStep, m: int) -> None:
        if m == 0 and not self._model.anatomy.stem_shared:
            self._sums[0].open()
        gradient = step.gradient[m]
        assert gradient is not None
        self._device.touch(f"unembed({m})", on=StreamName.COMPUTE, reads=("stem",))
        step.passes[m].finish(gradient, accumulate=self._ends.accumulate)
        step.gradient[m] = None

    def _offload(self, step: RunningStep, unit: int) -> None:
        step.add_norms(unit, self._sums[unit].norms())
        if unit == 0:  # the last one: before its slab, so that loss and norm do not queue behind it on the link
            step.numbers_home = self._numbers.send(step)
        self._layers.touch(unit, self._sums[unit])
        touched, runs = self._ends.touched(unit), self._ends.runs(unit)
        if unit in self._resident.units:
            self._gradients.keep(runs)
            step.home[unit] = UnitGradient(unit, _at_once, touched, resident=self._resident.units[unit])
            return
        home = self._gradients.offload(runs, unit=unit)
        step.home[unit] = UnitGradient(unit, self._ends.arrival(unit, home=home), touched)


def _at_once() -> None:
    """The wait for a gradient that compute has before it updates with it."""
