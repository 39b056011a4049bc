"""Streams on a real device: overlapped = not overlapped, bit for bit, also when one stream lags.

Layers of more than 256 MiB with very little compute: long copies beside short kernels provoke every race
that a missing wait would allow.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from megatrain.host.arena import footprint
from megatrain.host.store import HostStore
from megatrain.model.attention import VARLEN
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import load_kernel
from megatrain.optim.kernel.on_device import NAME, SOURCE, DeviceKernel
from megatrain.optim.worker import OptimizerWorker
from megatrain.stream.device import Event, StreamName
from megatrain.stream.device_cuda import CudaDevice, open_cuda
from megatrain.stream.device_cuda_kernel import CudaKernel
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry
from megatrain.train.bench import fill_synthetic

pytestmark = pytest.mark.gpu

LAYERS, ROWS, LENGTH, MICRO_BATCHES, STEPS = 5, 2, 64, 2, 2
DELAY_CYCLES = 20_000_000  # about 10 ms
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=4096,
    intermediate_size=8192,
    num_hidden_layers=LAYERS,
    num_attention_heads=32,
    num_key_value_heads=8,
)
INPUT_BYTES = ROWS * LENGTH * CONFIG.hidden_size * 2
ATTENTION_BYTES = ROWS * LENGTH * (CONFIG.hidden_size * 2 + CONFIG.num_attention_heads * 4)


class SerialDevice(CudaDevice):
    """Every operation ends before the next is enqueued."""

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        self.synchronize()
        super().copy(target, source=source, on=on, reads=reads, writes=writes)
        self.synchronize()

    def wait(self, event: Event, *, on: StreamName, keeps: str) -> None:
        self.synchronize()


class LaggingDevice(CudaDevice):
    """One stream sleeps before each of its copies; COMPUTE sleeps before it records."""

    lagging = StreamName.FETCH

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        if on is self.lagging:
            with torch.cuda.stream(self._streams[on]):
                torch.cuda._sleep(DELAY_CYCLES)
        super().copy(target, source=source, on=on, reads=reads, writes=writes)

    def record(self, event: Event, *, on: StreamName) -> None:
        if on is self.lagging is StreamName.COMPUTE:
            torch.cuda._sleep(DELAY_CYCLES // 8)
        super().record(event, on=on)


def batches(seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, 0] = IGNORE
        out.append(MicroBatch(ids, labels, None, None, ids.numel(), ROWS * (LENGTH - 1)))
    return out


@pytest.fixture(scope="module")
def store() -> Iterator[HostStore]:
    """One arena for every run of this file: page-locking it is what takes time."""
    model = StreamedModel.build(ModelSpec(CONFIG, "sdpa", torch.bfloat16, True, False), rng=_open(CudaDevice).rng)
    rows = 16 * LAYERS * MICRO_BATCHES * footprint(INPUT_BYTES + ATTENTION_BYTES, pinned=True)
    rows += 16 * footprint(CONFIG.vocab_size * CONFIG.hidden_size * 2, pinned=True)  # of the embedding
    made = HostStore.allocate(model.anatomy, pin=True, threads=8, extra_pinned_bytes=rows)
    yield made
    torch.cuda.synchronize()
    made.close()


def _open(kind: type[CudaDevice]) -> CudaDevice:
    device = kind(open_cuda(0), ceiling_bytes=None)
    device._cudnn_attention = False  # its backward sums in no fixed order
    return device


def run(
    store: HostStore,
    device: CudaDevice,
    *,
    slots: int,
    loads: int,
    resident: int = 0,
    kept: int = 0,
    head_slices: int = 0,
    attention: str = "sdpa",
    kept_attention: str = "",
    expert_groups: int = 0,
) -> tuple[list[tuple[float, float]], Tensor]:
    """(loss, norm) of each step, and all gradients, weights and moments at the end as one checksum vector."""
    for host in store.units:
        for tensor in (host.lo, host.exp_avg, host.exp_avg_sq, host.grad, host.steps):
            tensor.zero_()
    fill_synthetic(store)
    model = StreamedModel.build(ModelSpec(CONFIG, attention, torch.bfloat16, True, False), rng=device.rng)
    optimizer = AdamW(
        store,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        decay_all=False,
        never_decay=frozenset(),
        kernel=load_kernel(threads=8),
        device_kernel=DeviceKernel(CudaKernel(SOURCE.read_text(), name=NAME, device=device.torch_device)),
    )
    worker = OptimizerWorker(optimizer, store=store)
    geometry = Geometry(
        MICRO_BATCHES,
        slots,
        2,
        loads,
        head_chunk=48 if head_slices else 256,
        input_bytes=INPUT_BYTES,
        resident=resident,
        kept=kept,
        head_slices=head_slices,
        embedding_rows=CONFIG.vocab_size if head_slices else 0,
        attention_bytes=ATTENTION_BYTES if kept_attention else 0,
        attention_buffers=2 if kept_attention == "host" else 0,
        expert_groups=expert_groups,
    )
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=worker, poison=True)
    numbers = []
    for step in range(STEPS):
        out = executor.train_step(batches(step), seed=step)
        result = out.result()
        numbers.append((result.loss, result.grad_norm))
        worker.submit(step + 1, out.gradients, lr=1e-3, clip=0.5)
    worker.drain()
    worker.close()
    executor.bring_home()
    for gradient in out.gradients:
        if gradient.resident is not None:
            store.units[gradient.unit].grad.copy_(gradient.resident.grad)
    sums = [
        tensor.view(torch.int16).to(torch.int64).sum()
        for host in store.units
        for tensor in (host.grad, host.hi, host.lo, host.exp_avg, host.exp_avg_sq)
    ]
    return numbers, torch.stack(sums)


@pytest.fixture(scope="module")
def serial(store: HostStore) -> tuple[list[tuple[float, float]], Tensor]:
    return run(store, _open(SerialDevice), slots=2, loads=0)


def test_layers_are_large(store: HostStore) -> None:
    assert min(layer.unit.layout.nbytes for layer in store.layers) >= 256 << 20


@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize(("slots", "loads"), [(2, 0), (2, 2), (3, 1)])
def test_overlap_changes_no_bit(
    store: HostStore, serial: tuple[list[tuple[float, float]], Tensor], slots: int, loads: int, repeat: int
) -> None:
    numbers, sums = run(store, _open(CudaDevice), slots=slots, loads=loads)
    assert numbers == serial[0]
    assert torch.equal(sums, serial[1])


@pytest.mark.parametrize(("resident", "kept"), [(1, 0), (3, 2), (LAYERS + 1, 2), (LAYERS + 2, LAYERS)])
def test_what_stays_on_the_device_changes_no_bit(
    store: HostStore, serial: tuple[list[tuple[float, float]], Tensor], resident: int, kept: int
) -> None:
    """Updated by the kernel on the device, with graphs kept, half streamed or not at all."""
    numbers, sums = run(store, _open(CudaDevice), slots=2, loads=0, resident=resident, kept=kept)
    assert numbers == serial[0]
    assert torch.equal(sums, serial[1])


@pytest.mark.parametrize("lagging", [StreamName.FETCH, StreamName.SEND, StreamName.COMPUTE])
def test_a_lagging_stream_changes_no_bit(
    store: HostStore, serial: tuple[list[tuple[float, float]], Tensor], lagging: StreamName
) -> None:
    device = _open(LaggingDevice)
    device.lagging = lagging
    numbers, sums = run(store, device, slots=2, loads=2)
    assert numbers == serial[0]
    assert torch.equal(sums, serial[1])


@pytest.fixture(scope="module")
def serial_varlen(store: HostStore) -> tuple[list[tuple[float, float]], Tensor]:
    """Attention recomputed."""
    return run(store, _open(SerialDevice), slots=2, loads=0, attention=VARLEN)


@pytest.mark.parametrize(
    ("where", "loads", "lagging"),
    [
        ("device", 0, None),
        ("device", 2, None),
        ("host", 0, None),
        ("host", 2, StreamName.FETCH),
        ("host", 2, StreamName.SEND),
        ("host", 2, StreamName.COMPUTE),
    ],
)
def test_kept_attention_changes_no_bit(
    store: HostStore,
    serial_varlen: tuple[list[tuple[float, float]], Tensor],
    where: str,
    loads: int,
    lagging: StreamName | None,
) -> None:
    device = _open(CudaDevice if lagging is None else LaggingDevice)
    if isinstance(device, LaggingDevice):
        assert lagging is not None
        device.lagging = lagging
    numbers, sums = run(store, device, slots=2, loads=loads, attention=VARLEN, kept_attention=where)
    assert numbers == serial_varlen[0]
    assert torch.equal(sums, serial_varlen[1])


@pytest.fixture(scope="module")
def serial_slices(store: HostStore) -> tuple[list[tuple[float, float]], Tensor]:
    return run(store, _open(SerialDevice), slots=2, loads=0, head_slices=4)


@pytest.mark.parametrize("lagging", [None, StreamName.FETCH, StreamName.SEND, StreamName.COMPUTE])
def test_overlap_of_slices_changes_no_bit(
    store: HostStore, serial_slices: tuple[list[tuple[float, float]], Tensor], lagging: StreamName | None
) -> None:
    device = _open(CudaDevice if lagging is None else LaggingDevice)
    if isinstance(device, LaggingDevice):
        assert lagging is not None
        device.lagging = lagging
    numbers, sums = run(store, device, slots=2, loads=2, head_slices=4)
    assert numbers == serial_slices[0]
    assert torch.equal(sums, serial_slices[1])


def test_slices_are_within_the_noise_of_bf16(
    serial: tuple[list[tuple[float, float]], Tensor], serial_slices: tuple[list[tuple[float, float]], Tensor]
) -> None:
    """The logits and slopes of a slice are rounded to bf16 as those of the whole head are; their sums are fp32."""
    for (loss, norm), (expected_loss, expected_norm) in zip(serial_slices[0], serial[0], strict=True):
        assert loss == pytest.approx(expected_loss, rel=2**-9)
        assert norm == pytest.approx(expected_norm, rel=2**-7)


@pytest.mark.parametrize(("head_slices", "kept_attention"), [(0, ""), (4, ""), (0, "host")])
def test_a_step_neither_synchronises_nor_allocates(store: HostStore, head_slices: int, kept_attention: str) -> None:
    """Sync-debug mode raises on any hidden synchronisation; the pool must not grow after the second step."""
    device = _open(CudaDevice)
    model = StreamedModel.build(ModelSpec(CONFIG, VARLEN, torch.bfloat16, True, False), rng=device.rng)

    class Done:
        def updated(self, unit: int) -> bool:
            return True

        def wait_updated(self, unit: int) -> None: ...

    geometry = Geometry(
        MICRO_BATCHES,
        2,
        2,
        2,
        head_chunk=48 if head_slices else 256,
        input_bytes=INPUT_BYTES,
        head_slices=head_slices,
        embedding_rows=CONFIG.vocab_size if head_slices else 0,
        attention_bytes=ATTENTION_BYTES if kept_attention else 0,
        attention_buffers=2 if kept_attention else 0,
    )
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=Done())
    for step in range(2):
        executor.train_step(batches(step), seed=step).result()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = executor.train_step(batches(2), seed=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    out.result()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
