"""Experts in groups on a real device: overlapped = not overlapped, no hidden synchronisation, noise of bf16.

Groups of 100 MB with very little compute, as in test_streams.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import test_streams
import torch
from test_streams import MICRO_BATCHES, LaggingDevice, SerialDevice, _open, batches, run
from torch import Tensor
from transformers import MixtralConfig

from megatrain.host.arena import footprint
from megatrain.host.store import HostStore
from megatrain.model.attention import VARLEN
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.stream.device import StreamName
from megatrain.stream.device_cuda import CudaDevice
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry

pytestmark = pytest.mark.gpu

CONFIG = MixtralConfig(
    vocab_size=512,
    hidden_size=2048,
    intermediate_size=4096,
    num_local_experts=8,
    num_hidden_layers=3,
    num_attention_heads=16,
    num_key_value_heads=4,
    sliding_window=None,
)
GROUPS = 4
INPUT_BYTES = test_streams.ROWS * test_streams.LENGTH * CONFIG.hidden_size * 2

Found = tuple[list[tuple[float, float]], Tensor]


@pytest.fixture(scope="module", autouse=True)
def mixture() -> Iterator[None]:
    """test_streams.py's runs, of this model."""
    with (
        mock.patch.object(test_streams, "CONFIG", CONFIG),
        mock.patch.object(test_streams, "LAYERS", CONFIG.num_hidden_layers),
        mock.patch.object(test_streams, "INPUT_BYTES", INPUT_BYTES),
    ):
        yield


@pytest.fixture(scope="module")
def mixed(mixture: None) -> Iterator[HostStore]:
    model = StreamedModel.build(ModelSpec(CONFIG, "sdpa", torch.bfloat16, True, False), rng=_open(CudaDevice).rng)
    rows = 16 * CONFIG.num_hidden_layers * MICRO_BATCHES * footprint(INPUT_BYTES, pinned=True)
    rows += 16 * footprint(CONFIG.vocab_size * CONFIG.hidden_size * 2, pinned=True)
    made = HostStore.allocate(model.anatomy, pin=True, threads=8, extra_pinned_bytes=rows)
    yield made
    torch.cuda.synchronize()
    made.close()


@pytest.fixture(scope="module")
def serial_groups(mixed: HostStore) -> Found:
    return run(mixed, _open(SerialDevice), slots=2, loads=0, expert_groups=GROUPS)


@pytest.mark.parametrize("slices", [0, 4])
@pytest.mark.parametrize("lagging", [None, StreamName.FETCH, StreamName.SEND, StreamName.COMPUTE])
def test_overlap_of_groups_changes_no_bit(mixed: HostStore, lagging: StreamName | None, slices: int) -> None:
    serial = run(mixed, _open(SerialDevice), slots=2, loads=0, expert_groups=GROUPS, head_slices=slices)
    device = _open(CudaDevice if lagging is None else LaggingDevice)
    if isinstance(device, LaggingDevice):
        assert lagging is not None
        device.lagging = lagging
    numbers, sums = run(mixed, device, slots=2, loads=2, expert_groups=GROUPS, head_slices=slices)
    assert numbers == serial[0]
    assert torch.equal(sums, serial[1])


def test_groups_are_within_the_noise_of_bf16(mixed: HostStore, serial_groups: Found) -> None:
    """What a group gives is rounded to bf16 and summed in fp32; whole layers round the sum."""
    whole = run(mixed, _open(SerialDevice), slots=2, loads=0)
    for (loss, norm), (expected_loss, expected_norm) in zip(serial_groups[0], whole[0], strict=True):
        assert loss == pytest.approx(expected_loss, rel=2**-9)
        assert norm == pytest.approx(expected_norm, rel=2**-6)


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_neither_synchronises_nor_allocates(mixed: HostStore, compile: bool) -> None:
    """Sync-debug mode raises on any hidden synchronisation; the pool must not grow after the second step.

    The attention is the product's: transformers makes masks for sdpa after a look at the positions.
    """
    device = _open(CudaDevice)
    model = StreamedModel.build(ModelSpec(CONFIG, VARLEN, torch.bfloat16, True, compile), rng=device.rng)

    class Done:
        def updated(self, unit: int) -> bool:
            return True

        def wait_updated(self, unit: int) -> None: ...

    geometry = Geometry(
        MICRO_BATCHES, 2, 2, 2, head_chunk=256, input_bytes=INPUT_BYTES, expert_groups=GROUPS
    )  # fmt: skip
    executor = StreamingExecutor(model, store=mixed, device=device, geometry=geometry, updates=Done())
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
