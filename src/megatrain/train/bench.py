"""How fast a recipe's step is on this machine: the product's own rooms on synthetic tokens.

FLOP of a token = 6 x parameters that multiply (everything but the embedding lookup) + 6 x layers x sequence
x hidden (causal attention, forward and backward); recomputation is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from megatrain.host.store import HostStore
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.report.process import host_peak_bytes
from megatrain.stream.tracing import Span, TracedDevice
from megatrain.train.build import Planned, Rooms, build_rooms
from megatrain.train.trainer import clip_factor

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
WARMUP_STEPS = 2
PATTERN = 1 << 22
"""Random numbers that fill the weights over and over: drawing billions would take longer than the benchmark."""


@dataclass(frozen=True)
class BenchStep:
    """One measured step."""

    step_s: float
    loss: float
    grad_norm: float
    optimizer_s: float  # of the update that ran under this step
    exposed_optimizer_s: float
    exposed_transfer_s: float


@dataclass(frozen=True)
class BenchReport:
    """Medians over the measured steps."""

    device: str
    params_total: int
    tokens_per_step: int
    seq_len: int
    micro_batch: int
    micro_batches: int
    slots: int
    activations: str
    head_chunk: int
    threads: int
    build_s: float
    warmup_s: float
    step_s: float
    step_s_min: float
    step_s_max: float
    tokens_per_s: float
    tflops: float
    optimizer_s: float
    exposed_optimizer_s: float
    exposed_transfer_s: float
    vram_peak_bytes: int
    vram_planned_bytes: int
    host_peak_bytes: int
    host_planned_bytes: int
    host_bytes_per_parameter: float
    losses: tuple[float, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def synthetic_batches(planned: Planned, *, seed: int) -> list[MicroBatch]:
    """One step of random tokens, every one supervised but the first of a row."""
    chosen = planned.plan
    generator = torch.Generator().manual_seed(seed)
    vocabulary = planned.model.sizes.vocab_size
    left, out = planned.recipe.train.batch_size, []
    while left:
        rows = min(left, chosen.micro_batch)
        ids = torch.randint(0, vocabulary, (rows, chosen.seq_len), generator=generator)
        labels = ids.clone()
        labels[:, 0] = IGNORE
        out.append(MicroBatch(ids, labels, None, None, ids.numel(), rows * (chosen.seq_len - 1)))
        left -= rows
    return out


def fill_synthetic(store: HostStore) -> None:
    """Weights of about the size a trained model has: matrices N(0, 0.02), vectors 1, biases 0."""
    pattern = torch.randn(PATTERN, generator=torch.Generator().manual_seed(0)) * 0.02
    halved = pattern.to(torch.bfloat16)
    for host in store.units:
        for entry in host.unit.layout.params:
            target = host.streamed(entry).view(-1)
            if len(entry.shape) < 2:
                target.fill_(0.0 if entry.name.endswith("bias") else 1.0)
                continue
            source = halved if entry.dtype is torch.bfloat16 else pattern
            for first in range(0, entry.numel, PATTERN):
                piece = target[first : first + PATTERN]
                piece.copy_(source[: piece.numel()])


def run_steps(rooms: Rooms, planned: Planned, *, count: int) -> Iterator[BenchStep]:
    """The trainer's loop without its reporting: exact clipping, the update under the next forward."""
    for number in range(count):
        began = time.perf_counter()
        output = rooms.executor.train_step(synthetic_batches(planned, seed=number % 2), seed=number)
        numbers = output.result()
        clip = clip_factor(numbers.grad_norm, limit=MAX_GRAD_NORM)
        rooms.worker.submit(number + 1, output.gradients, lr=LEARNING_RATE, clip=clip)
        yield BenchStep(
            step_s=time.perf_counter() - began,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            optimizer_s=rooms.worker.last_update_s,
            exposed_optimizer_s=numbers.exposed_optimizer_s,
            exposed_transfer_s=numbers.exposed_transfer_s,
        )


@dataclass(frozen=True)
class StepTrace:
    """What ran during two steady steps, the second of them between `start_s` and `end_s`."""

    spans: tuple[Span, ...]
    start_s: float
    end_s: float


class _Updates:
    """When the optimizer worked on which unit, on the clock of a traced device."""

    def __init__(self, traced: TracedDevice) -> None:
        self._traced, self._began_s = traced, 0.0
        self.spans: list[Span] = []

    def before(self, unit: int) -> None:
        self._began_s = time.perf_counter()

    def after(self, unit: int) -> None:
        if self._traced.recording:
            zero_s = self._traced.zero_s
            self.spans.append(
                Span("optimizer", f"update({unit})", self._began_s - zero_s, time.perf_counter() - zero_s)
            )


def bench(planned: Planned, *, steps: int, trace: bool = False) -> tuple[BenchReport, StepTrace | None]:
    """Build the rooms, run warm-up and measured steps, then two traced ones if asked (they are slower), close."""
    traced = TracedDevice(planned.device)
    updates = _Updates(traced)
    planned = replace(planned, device=traced)
    began = time.perf_counter()
    rooms = build_rooms(planned, fill=fill_synthetic, before_unit=updates.before, after_unit=updates.after)
    build_s = time.perf_counter() - began
    began = time.perf_counter()
    warm = list(run_steps(rooms, planned, count=WARMUP_STEPS))
    warmup_s = time.perf_counter() - began
    planned.device.reset_memory_peak()
    measured = list(run_steps(rooms, planned, count=steps))
    report = _report(planned, warm=warm, measured=measured, build_s=build_s, warmup_s=warmup_s)
    rooms.worker.drain()
    steps_trace = _trace(rooms, planned, traced, updates) if trace else None
    rooms.worker.close()
    rooms.store.close()
    return report, steps_trace


def _trace(rooms: Rooms, planned: Planned, traced: TracedDevice, updates: _Updates) -> StepTrace:
    edges = [0.0]
    with traced.record_spans():
        for _ in run_steps(rooms, planned, count=2):
            edges.append(time.perf_counter() - traced.zero_s)
        rooms.worker.drain()
        return StepTrace((*traced.spans(), *updates.spans), edges[1], edges[2])


def _report(
    planned: Planned, *, warm: list[BenchStep], measured: list[BenchStep], build_s: float, warmup_s: float
) -> BenchReport:
    chosen, sizes = planned.plan, planned.model.sizes
    tokens = planned.recipe.train.batch_size * chosen.seq_len
    step_s = statistics.median(s.step_s for s in measured)
    embedding = sizes.vocab_size * sizes.hidden_numel_per_token if not planned.model.anatomy.stem_in_tail else 0
    attention = len(sizes.layers) * chosen.seq_len * sizes.hidden_numel_per_token
    flop = 6 * (sizes.params_active - embedding + attention) * tokens
    host = host_peak_bytes()
    return BenchReport(
        device=planned.device_name,
        params_total=sizes.params_total,
        tokens_per_step=tokens,
        seq_len=chosen.seq_len,
        micro_batch=chosen.micro_batch,
        micro_batches=chosen.micro_batches,
        slots=chosen.slots,
        activations=chosen.activations,
        head_chunk=chosen.head_chunk,
        threads=chosen.threads,
        build_s=build_s,
        warmup_s=warmup_s,
        step_s=step_s,
        step_s_min=min(s.step_s for s in measured),
        step_s_max=max(s.step_s for s in measured),
        tokens_per_s=tokens / step_s,
        tflops=flop / step_s / 1e12,
        optimizer_s=statistics.median(s.optimizer_s for s in measured),
        exposed_optimizer_s=statistics.median(s.exposed_optimizer_s for s in measured),
        exposed_transfer_s=statistics.median(s.exposed_transfer_s for s in measured),
        vram_peak_bytes=planned.device.memory_peak_bytes(),
        vram_planned_bytes=chosen.device_total,
        host_peak_bytes=host,
        host_planned_bytes=chosen.host_total,
        host_bytes_per_parameter=host / sizes.params_total,
        losses=tuple(s.loss for s in (*warm, *measured)),
    )
