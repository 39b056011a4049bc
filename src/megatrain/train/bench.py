"""How fast a recipe's step is on this machine: the product's own rooms and steps, made-up weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatrain.data import Prepared
from megatrain.host.store import HostStore
from megatrain.stream.tracing import Span, TracedDevice
from megatrain.train.bench_report import BenchReport, BenchStep, Course, StepTrace, bench_report
from megatrain.train.bench_tokens import BenchTokens, random_tokens, recipe_tokens
from megatrain.train.build import Rooms, build_rooms
from megatrain.train.planning import Planned
from megatrain.train.trainer import clip_factor

LEARNING_RATE = 1e-5
WARMUP_STEPS = 2
PATTERN = 1 << 22
"""Random numbers that fill the weights over and over: drawing billions would take longer than the benchmark."""


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


@dataclass(frozen=True)
class Bench:
    """What is measured: rooms that are built, the steps' tokens, and the recipe's clipping."""

    rooms: Rooms
    tokens: Sequence[BenchTokens]
    max_grad_norm: float | None


def run_steps(setup: Bench, *, count: int, first: int = 0) -> Iterator[BenchStep]:
    """The trainer's loop without its reporting: exact clipping, the update under the next forward.

    `first` counts from 0; step n takes `tokens[n]`, from the start again when they run out.
    """
    rooms, tokens = setup.rooms, setup.tokens
    for number in range(first, first + count):
        given = tokens[number % len(tokens)]
        began = time.perf_counter()
        output = rooms.executor.train_step(given.micro_batches, seed=number)
        enqueued = time.perf_counter()
        numbers = output.result()
        waited_s = time.perf_counter() - enqueued
        clip = clip_factor(numbers.grad_norm, limit=setup.max_grad_norm)
        rooms.worker.submit(number + 1, output.gradients, lr=LEARNING_RATE, clip=clip)
        yield BenchStep(
            step_s=time.perf_counter() - began,
            tokens=given.tokens,
            positions=given.positions,
            attended=given.attended,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            optimizer_s=rooms.worker.last_update_s,
            exposed_optimizer_s=numbers.exposed_optimizer_s,
            exposed_transfer_s=numbers.exposed_transfer_s,
            waited_s=waited_s,
        )


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
            start_s = max(0.0, self._began_s - zero_s)
            self.spans.append(Span("optimizer", f"update({unit})", start_s, time.perf_counter() - zero_s))


@dataclass(frozen=True)
class BenchResult:
    """What was found, and what ran in a traced step."""

    report: BenchReport
    trace: StepTrace


def bench(planned: Planned, *, steps: int, prepared: Prepared | None = None, traced_steps: int = 1) -> BenchResult:
    """Build the rooms, run warm-up and measured steps, then `traced_steps` more that are recorded, and close.

    prepared: the recipe's data; None: full rows of random tokens. The weights are made up in either case.
    """
    device = TracedDevice(planned.device)
    updates = _Updates(device)
    planned = replace(planned, device=device)
    tokens = (
        random_tokens(planned)
        if prepared is None
        else recipe_tokens(planned, prepared=prepared, count=WARMUP_STEPS + steps)
    )
    began = time.perf_counter()
    rooms = build_rooms(planned, fill=fill_synthetic, before_unit=updates.before, after_unit=updates.after)
    build_s = time.perf_counter() - began
    began = time.perf_counter()
    setup = Bench(rooms, tokens, planned.recipe.train.max_grad_norm)
    warm = list(run_steps(setup, count=WARMUP_STEPS))
    warmup_s = time.perf_counter() - began
    planned.device.reset_memory_peak()
    before = planned.device.memory_given_back()
    measured = list(run_steps(setup, count=steps, first=WARMUP_STEPS))
    given_back = planned.device.memory_given_back() - before
    trace = _trace(setup, device, updates, count=traced_steps)
    data = "random tokens" if prepared is None else "the recipe's rows"
    report = bench_report(planned, course=Course(warm, measured, trace, build_s, warmup_s, data, given_back))
    rooms.worker.close()
    rooms.store.close()
    return BenchResult(report, trace)


def _trace(setup: Bench, device: TracedDevice, updates: _Updates, *, count: int) -> StepTrace:
    """Record `count` steps, the last of which is to be looked at; before the first an update still runs, as ever."""
    edges = [0.0]
    with device.record_spans():
        for _ in run_steps(setup, count=count):
            edges.append(time.perf_counter() - device.zero_s)
        setup.rooms.worker.drain()
        return StepTrace((*device.spans(), *updates.spans), edges[-2], edges[-1])
