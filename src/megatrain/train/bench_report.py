"""What a benchmark found, as one flat object: medians over the measured steps, and how far they are from the limit.

FLOP of a token = 6 x parameters that multiply (everything but the embedding lookup) + 6 x layers x hidden x the
length of its document (causal attention, forward and backward); recomputation and padding are not counted.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.plan.speed import step_flops
from megatrain.report.bound import bound_by
from megatrain.report.process import host_peak_bytes, vram_by_driver
from megatrain.report.trace import busy_share, copy_rate
from megatrain.stream.tracing import Span
from megatrain.train.planning import Planned
from megatrain.train.yardstick import yardstick


@dataclass(frozen=True)
class BenchStep:
    """One measured step."""

    step_s: float
    tokens: int  # padding excluded
    positions: int  # padding included
    attended: float
    loss: float
    grad_norm: float
    optimizer_s: float  # of the update that ran under this step
    exposed_optimizer_s: float
    exposed_transfer_s: float
    waited_s: float  # by the host for the device, when all was enqueued


@dataclass(frozen=True)
class StepTrace:
    """What ran while it was recorded, and the steady step of it, between `start_s` and `end_s`."""

    spans: tuple[Span, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class BenchReport:
    """Medians over the measured steps. `light_*` and `mfu` are None where the device's peak is not known."""

    device: str
    params_total: int
    data: str  # "random tokens" | "the recipe's rows"
    packed: bool
    tokens_per_step: int  # padding excluded
    positions_per_step: int  # padding included
    seq_len: int
    micro_batch: int
    micro_batches: int
    slots: int
    resident: int  # units whose weights and optimizer state stay on the device
    kept: int  # layers whose forward is kept for the backward
    activations: str
    attention: str  # where what attention gave waits for the backward; "": it is recomputed
    head_slices: int
    expert_groups: int
    tile_tokens: int
    head_chunk: int
    threads: int
    build_s: float
    warmup_s: float
    step_s: float
    step_s_min: float
    step_s_max: float
    step_times_s: tuple[float, ...]
    tokens_per_s: float  # padding excluded
    tflops: float
    peak_tflops: float | None  # dense bf16, from the data sheet
    mfu: float | None
    optimizer_s: float
    exposed_optimizer_s: float
    exposed_transfer_s: float
    waited_s: float  # by the host for the device, when all was enqueued: near 0, the device waits for kernels
    bound_by: str  # the resource that the step spends most time under
    light_s: float | None  # the speed of light: the slowest resource alone
    light_by: str | None
    light_share: float | None  # light_s / step_s
    estimate: dict[str, Any] | None  # the cost model with this run's rates of link and update
    compute_busy_share: float  # of one traced step
    fetch_bytes_per_s: float | None  # inside copies of 16 MiB and more, of one traced step
    send_bytes_per_s: float | None
    vram_peak_bytes: int
    vram_driver_bytes: int | None  # the driver's count for this process after the last step
    vram_planned_bytes: int
    vram_given_back: int  # times that PyTorch's pool was too full in the measured steps, and waited for the device
    vram_planned: dict[str, int]  # by purpose
    host_peak_bytes: int
    host_planned_bytes: int
    host_planned: dict[str, int]
    host_bytes_per_parameter: float
    losses: tuple[float | None, ...]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Course:
    """The steps of one benchmark."""

    warm: Sequence[BenchStep]
    measured: Sequence[BenchStep]
    trace: StepTrace
    build_s: float
    warmup_s: float
    data: str
    given_back: int = 0  # times that the device's memory was, in the measured steps


def bench_report(planned: Planned, *, course: Course) -> BenchReport:
    """Called while the rooms still hold their memory."""
    sizes = planned.model.sizes
    return BenchReport(
        device=planned.device_name,
        params_total=sizes.params_total,
        data=course.data,
        packed=planned.recipe.data.packing,
        tokens_per_step=round(_median(s.tokens for s in course.measured)),
        positions_per_step=round(_median(s.positions for s in course.measured)),
        build_s=course.build_s,
        warmup_s=course.warmup_s,
        losses=tuple(_number(s.loss) for s in (*course.warm, *course.measured)),
        **_cut(planned),
        **_times(course.measured, enqueues=planned.on_cuda),
        **_limits(planned, course=course),
        vram_given_back=course.given_back,
        **_memory(planned),
    )


def _cut(planned: Planned) -> dict[str, Any]:
    chosen = planned.plan
    return {
        "seq_len": chosen.seq_len,
        "micro_batch": chosen.micro_batch,
        "micro_batches": chosen.micro_batches,
        "slots": chosen.slots,
        "resident": chosen.resident,
        "kept": chosen.kept,
        "activations": chosen.activations,
        "attention": chosen.attention,
        "head_slices": chosen.head_slices,
        "expert_groups": chosen.expert_groups,
        "tile_tokens": chosen.tile_tokens,
        "head_chunk": chosen.head_chunk,
        "threads": chosen.threads,
    }


def _times(measured: Sequence[BenchStep], *, enqueues: bool) -> dict[str, Any]:
    times = {
        "step_s": _median(s.step_s for s in measured),
        "optimizer_s": _median(s.optimizer_s for s in measured),
        "exposed_optimizer_s": _median(s.exposed_optimizer_s for s in measured),
        "exposed_transfer_s": _median(s.exposed_transfer_s for s in measured),
    }
    waited_s = _median(s.waited_s for s in measured)
    return times | {
        "waited_s": waited_s,
        "step_s_min": min(s.step_s for s in measured),
        "step_s_max": max(s.step_s for s in measured),
        "step_times_s": tuple(s.step_s for s in measured),
        "tokens_per_s": _median(s.tokens / s.step_s for s in measured),
        "bound_by": bound_by(**times, waited_s=waited_s if enqueues else None),
    }


def _limits(planned: Planned, *, course: Course) -> dict[str, Any]:
    measured, trace = course.measured, course.trace
    step_s = _median(s.step_s for s in measured)
    flops = _median(step_flops(planned.model.sizes, tokens=s.tokens, seq_len=s.attended) / s.step_s for s in measured)
    fetched, sent = (copy_rate(trace.spans, lane=lane) for lane in ("fetch", "send"))
    found: dict[str, Any] = {
        "tflops": flops / 1e12,
        "fetch_bytes_per_s": fetched,
        "send_bytes_per_s": sent,
        "compute_busy_share": busy_share(trace.spans, lane="compute", start_s=trace.start_s, end_s=trace.end_s),
    }
    stick = yardstick(
        planned.model.sizes,
        plan=planned.plan,
        device_name=planned.device_name,
        moment_bytes=planned.job.moment_bytes,
    )
    if stick is None:
        nothing = ("peak_tflops", "mfu", "light_s", "light_by", "light_share", "estimate")
        return found | dict.fromkeys(nothing)
    tokens = round(_median(s.tokens for s in measured))
    optimizer_s = _median(s.optimizer_s for s in measured)
    own = stick.measured(optimizer_s=optimizer_s, link_in_bytes=fetched, link_out_bytes=sent)
    light, peak = own.estimate(tokens), own.rates.peak_flops
    return found | {
        "peak_tflops": peak / 1e12 if peak else None,
        "mfu": flops / peak if peak else None,
        "light_s": light.light_s,
        "light_by": light.light_by,
        "light_share": light.light_s / step_s,
        "estimate": light.to_dict(),
    }


def _memory(planned: Planned) -> dict[str, Any]:
    host = host_peak_bytes()
    driver = vram_by_driver(os.getpid()) if planned.on_cuda else None
    return {
        "vram_peak_bytes": max(planned.device.memory_peak_bytes(), driver or 0),
        "vram_driver_bytes": driver,
        "vram_planned_bytes": planned.plan.device_total,
        "vram_planned": planned.plan.device,
        "host_peak_bytes": host,
        "host_planned_bytes": planned.plan.host_total,
        "host_planned": planned.plan.host,
        "host_bytes_per_parameter": host / planned.model.sizes.params_total,
    }


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _number(value: float) -> float | None:
    """JSON has no NaN: a loss that is none becomes null."""
    return value if math.isfinite(value) else None
