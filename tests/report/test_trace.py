"""Timelines as files and as pictures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatrain.report.trace import busy_s, busy_share, copy_rate, picture, write_chrome_trace


@dataclass(frozen=True)
class Span:
    lane: str
    what: str
    start_s: float
    end_s: float
    nbytes: int = 0


SPANS = [
    Span("fetch", "host1 -> slot0", 0.0, 0.5, 32 << 20),
    Span("compute", "forward(1,0)", 0.5, 1.0),
    Span("compute", "forward(1,1)", 0.75, 1.25),
    Span("optimizer", "update(1)", 1.5, 2.0),
]


def test_a_chrome_trace_has_every_span_with_its_rate(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "t.json", SPANS)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in spans] == [s.what for s in SPANS]
    assert spans[0]["dur"] == pytest.approx(5e5)
    assert spans[0]["args"]["GB/s"] == pytest.approx((32 << 20) / 0.5 / 1e9)
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"fetch", "compute", "send", "optimizer"}


def test_overlapping_spans_count_once() -> None:
    assert busy_s(SPANS, lane="compute") == pytest.approx(0.75)
    assert busy_s(SPANS, lane="send") == 0.0


def test_a_share_is_that_of_the_window() -> None:
    assert busy_share(SPANS, lane="compute", start_s=1.0, end_s=1.5) == pytest.approx(0.5)
    assert busy_share(SPANS, lane="optimizer", start_s=0.0, end_s=1.0) == 0.0


def test_the_rate_is_that_of_large_copies_only() -> None:
    small = Span("fetch", "stored", 0.5, 5.0, 1024)
    assert copy_rate([*SPANS, small], lane="fetch") == pytest.approx((32 << 20) / 0.5)
    assert copy_rate(SPANS, lane="send") is None


def test_the_picture_shows_who_was_busy_when() -> None:
    rows = picture(SPANS, start_s=0.0, end_s=2.0, width=8).splitlines()
    assert rows[0] == "fetch      ██      "
    assert rows[3] == "optimizer        ██"
