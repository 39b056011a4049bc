"""What a benchmark on a known GPU says of its steps: rates, the distance to the limit, the words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.cli.bench_text import report_text, trace_text
from megatrain.stream.tracing import Span
from megatrain.train.bench_report import BenchReport, BenchStep, Course, StepTrace, bench_report
from plan.test_speed import B3, cut

TOKENS = 65_536
GIB = 1 << 30


def planned() -> Any:
    plan = SimpleNamespace(
        **vars(cut(B3, rows=16, parts=4)),
        tile_tokens=0,
        expert_groups=0,
        threads=14,
        activations="device",
        head_chunk=4096,
        device={"weight slots": 17 * GIB},
        host={"gradients": 49 * GIB},
        device_total=17 * GIB,
        host_total=49 * GIB,
    )
    return SimpleNamespace(
        device_name="NVIDIA H200",
        on_cuda=True,
        device=SimpleNamespace(memory_peak_bytes=lambda: 16 * GIB),
        plan=plan,
        model=SimpleNamespace(sizes=B3),
        recipe=SimpleNamespace(data=SimpleNamespace(packing=False)),
        job=SimpleNamespace(moment_bytes=4),
    )


def step(step_s: float, *, tokens: int = TOKENS, loss: float = 12.0, waited_s: float = 0.4) -> BenchStep:
    return BenchStep(
        step_s=step_s,
        tokens=tokens,
        positions=TOKENS,
        attended=1024,
        loss=loss,
        grad_norm=1.0,
        optimizer_s=0.618,
        exposed_optimizer_s=0.063,
        exposed_transfer_s=0.011,
        waited_s=waited_s,
    )


def report(*measured: BenchStep) -> BenchReport:
    spans = (
        Span("fetch", "host1 -> slot0", 0.0, 0.01, 500_000_000),
        Span("compute", "forward(1,0)", 0.01, 2.7),
        Span("optimizer", "update(1)", 0.0, 0.6),
    )
    course = Course((step(9.0, loss=float("nan")),), measured, StepTrace(spans, 0.0, 2.7), 5.0, 15.0, "random tokens")
    return bench_report(planned(), course=course)


def test_the_row_that_was_measured_on_an_h200() -> None:
    found = report(step(2.726), step(2.729), step(2.732))
    assert found.tokens_per_s == pytest.approx(24_010, rel=1e-3)
    assert found.tflops == pytest.approx(455.4, abs=0.5)
    assert found.mfu == pytest.approx(455.4 / 989, abs=1e-3)
    assert found.bound_by == "compute"
    assert found.light_by == "compute"
    assert found.light_s is not None
    assert found.light_share == pytest.approx(found.light_s / 2.729)
    assert 0.75 < found.light_share < 0.9
    assert found.estimate is not None
    assert found.estimate["step_s"] == pytest.approx(2.729, rel=0.1)
    assert found.estimate["optimizer_s"] == pytest.approx(0.618)  # this run's own rate, not an assumed one
    assert found.estimate["rates"]["link_in_bytes"] == found.fetch_bytes_per_s == pytest.approx(50e9)
    assert found.send_bytes_per_s is None
    assert found.losses == (None, 12.0, 12.0, 12.0)  # JSON has no NaN
    assert found.vram_peak_bytes == 16 * GIB
    assert found.to_dict()["vram_planned"] == {"weight slots": 17 * GIB}


def test_padding_counts_for_nothing() -> None:
    full, half = report(step(2.7)), report(step(2.7, tokens=TOKENS // 2))
    assert half.tokens_per_s == pytest.approx(full.tokens_per_s / 2)
    assert half.mfu == pytest.approx((full.mfu or 0) / 2)
    assert half.positions_per_step == TOKENS


def test_the_words() -> None:
    lines = report_text(report(step(2.7, tokens=TOKENS // 2))).splitlines()
    assert (
        "3.40 B parameters, 32,768 tokens a step (4 x 16 x 1024, random tokens, 50% of the positions padding)"
        in lines[0]
    )
    assert "TFLOP/s, 23.3% of 989 (6 N + causal attention, no recompute)" in lines[1]
    assert lines[2].startswith("held by compute; speed of light ")
    assert "fetch 50.0 GB/s inside copies" in lines[3]
    assert "compute busy 99.6%" in lines[3]
    assert lines[4].startswith("VRAM 16.0 GiB (planned 17.0 GiB, pool and context: the driver tells no count); host ")


def test_launches_hold_a_step_whose_device_waits_for_kernels() -> None:
    found = report(step(2.7, waited_s=0.001))
    assert (found.bound_by, found.waited_s) == ("launches", 0.001)
    assert "held by launches: the host enqueues kernels no faster" in report_text(found)


def test_a_device_that_was_too_full_is_told() -> None:
    course = Course((), (step(2.7),), StepTrace((), 0.0, 2.7), 5.0, 15.0, "random tokens", given_back=12)
    found = bench_report(planned(), course=course)
    assert found.vram_given_back == 12
    assert "PyTorch gave memory back and took it anew 12 times while measured; host" in report_text(found)
    assert "gave memory back" not in report_text(report(step(2.7)))


def test_the_picture_can_be_coloured() -> None:
    trace = StepTrace((Span("compute", "x", 0.0, 1.0), Span("fetch", "y", 0.0, 0.5, 10)), 0.0, 1.0)
    plain, coloured = trace_text(trace, coloured=False), trace_text(trace, coloured=True)
    assert "\x1b" not in plain
    assert coloured.count("\x1b[0m") == len(plain.splitlines()) - 1
