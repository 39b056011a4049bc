"""The update runs under the next forward, layer by layer: an order that a serial version cannot produce."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from toy import B, D, S, ToyModel, toy_batches

from megatrain.host.store import HostStore
from megatrain.optim.adamw import AdamW
from megatrain.optim.worker import OptimizerWorker
from megatrain.stream.device import CpuDevice, StreamName
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry
from megatrain.stream.tracing import TracedDevice

LAYERS = 4


class WatchedDevice(CpuDevice):
    """Tells when the second step has fetched a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.second_step = False
        self.fetched = {unit: threading.Event() for unit in range(LAYERS + 2)}

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        super().copy(target, source=source, on=on, reads=reads, writes=writes)
        if self.second_step and reads.startswith("host"):
            self.fetched[int(reads.removeprefix("host"))].set()


def optimizer_of(store: HostStore) -> AdamW:
    return AdamW(
        store, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decay_all=False, never_decay=frozenset(), kernel=None
    )


def rooms(device: object, worker_hook: object) -> tuple[HostStore, OptimizerWorker, StreamingExecutor]:
    model = ToyModel(LAYERS, tied=False)
    store = HostStore.allocate(model.anatomy, pin=False, threads=1)
    for host in store.units:
        for entry in host.unit.layout.params:
            host.set_master(entry, torch.full(entry.shape, 0.1))
    worker = OptimizerWorker(optimizer_of(store), store=store, before_unit=worker_hook)  # type: ignore[arg-type]
    geometry = Geometry(2, 2, 2, 0, head_chunk=64, input_bytes=B * S * D * 4)
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=worker)  # type: ignore[arg-type]
    return store, worker, executor


def test_the_next_forward_fetches_a_layer_while_the_one_after_it_is_not_yet_updated() -> None:
    device = WatchedDevice()
    seen: list[int] = []

    def before(unit: int) -> None:
        """The update of a unit does not begin until the next step has fetched the unit before it."""
        if unit >= 2 and device.second_step:
            assert device.fetched[unit - 1].wait(timeout=20), f"unit {unit - 1} was not fetched under the update"
            seen.append(unit)

    store, worker, executor = rooms(device, before)
    out = executor.train_step(toy_batches(2), seed=0)
    out.result()
    device.second_step = True
    worker.submit(1, out.gradients, lr=0.1, clip=1.0)
    executor.train_step(toy_batches(2), seed=1).result()
    worker.drain()
    worker.close()
    store.close()
    assert seen == list(range(2, LAYERS + 2))


def test_an_error_of_the_optimizer_reaches_the_next_step_with_its_cause() -> None:
    def before(unit: int) -> None:
        if unit == 2:
            raise FloatingPointError("the disk ate it")

    store, worker, executor = rooms(CpuDevice(), before)
    out = executor.train_step(toy_batches(2), seed=0)
    out.result()
    worker.submit(1, out.gradients, lr=0.1, clip=1.0)
    with pytest.raises(RuntimeError, match="layer 1") as caught:
        executor.train_step(toy_batches(2), seed=1)
    assert isinstance(caught.value.__cause__, FloatingPointError)
    worker.close()
    store.close()


def test_after_a_step_that_raised_the_executor_refuses_to_go_on() -> None:
    store, worker, executor = rooms(CpuDevice(), lambda unit: None)

    class Interrupted(BaseException):
        pass

    def interrupt(unit: int) -> bool:
        if unit == 3:
            raise Interrupted
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "updated", interrupt)
        with pytest.raises(Interrupted):
            executor.train_step(toy_batches(2), seed=0)
    for go_on in (lambda: executor.train_step(toy_batches(2), seed=0), lambda: executor.evaluate(toy_batches(2))):
        with pytest.raises(RuntimeError, match="no free slot for unit 0"):
            go_on()
    worker.close()
    store.close()


def test_a_traced_device_notes_every_copy_and_only_while_it_records() -> None:
    device = TracedDevice(CpuDevice())
    store, worker, executor = rooms(device, lambda unit: None)
    executor.train_step(toy_batches(2), seed=0).result()
    with device.record_spans():
        executor.train_step(toy_batches(2), seed=0).result()
        spans = device.spans()
    executor.train_step(toy_batches(2), seed=0).result()
    fetched = [s for s in spans if s.lane == "fetch"]
    sent = [s for s in spans if s.lane == "send"]
    # forward: stem, 4 layers, tail; backward: the 2 layers that left their slots
    assert len(fetched) == LAYERS + 2 + (LAYERS - 2)
    assert {s.what.partition(" ")[0] for s in fetched} == {f"host{u}" for u in range(LAYERS + 2)}
    # each unit's gradient goes home once (stem and tail in pieces, being larger than a layer)
    assert {s.what.rpartition(" ")[2] for s in sent} == {f"slab{u}" for u in range(LAYERS + 2)}
    assert sum(s.nbytes for s in sent) == sum(host.unit.layout.param_bytes for host in store.units)
    assert [s.what for s in spans if s.what.startswith("backward")] == [
        f"backward({u},{m})" for u in range(LAYERS, 0, -1) for m in range(2)
    ]
    worker.close()
    store.close()
