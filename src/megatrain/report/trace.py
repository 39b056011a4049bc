"""A timeline of spans: as a Chrome/Perfetto trace, and as a picture in the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LANES = ("fetch", "compute", "send", "optimizer")


class SpanLike(Protocol):
    """One thing that ran on one lane. Seconds since the trace began."""

    @property
    def lane(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class _Cut:
    """The part of a span within a window."""

    lane: str
    start_s: float
    end_s: float
    what: str = ""
    nbytes: int = 0


def write_chrome_trace(path: Path, spans: Sequence[SpanLike]) -> None:
    """A file that chrome://tracing and ui.perfetto.dev open."""
    lanes = {lane: number for number, lane in enumerate(LANES)}
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    for span in spans:
        seconds = span.end_s - span.start_s
        arguments = {"bytes": span.nbytes, "GB/s": span.nbytes / seconds / 1e9} if span.nbytes and seconds > 0 else {}
        events.append(
            {
                "name": span.what,
                "ph": "X",
                "pid": 0,
                "tid": lanes[span.lane],
                "ts": span.start_s * 1e6,
                "dur": seconds * 1e6,
                "args": arguments,
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def busy_s(spans: Sequence[SpanLike], *, lane: str) -> float:
    """Seconds in which the lane ran something."""
    total, reached = 0.0, float("-inf")
    for span in sorted((s for s in spans if s.lane == lane), key=lambda s: s.start_s):
        start = max(span.start_s, reached)
        if span.end_s > start:
            total += span.end_s - start
            reached = span.end_s
    return total


def busy_share(spans: Sequence[SpanLike], *, lane: str, start_s: float, end_s: float) -> float:
    """The share of [start_s, end_s) in which the lane ran something, 0 to 1."""
    cut = [_Cut(s.lane, max(s.start_s, start_s), min(s.end_s, end_s)) for s in spans]
    return busy_s([s for s in cut if s.end_s > s.start_s], lane=lane) / (end_s - start_s)


def copy_rate(spans: Sequence[SpanLike], *, lane: str, at_least: int = 16 << 20) -> float | None:
    """Bytes per second inside the lane's copies of `at_least` bytes; None if there are none."""
    large = [s for s in spans if s.lane == lane and s.nbytes >= at_least]
    seconds = sum(s.end_s - s.start_s for s in large)
    return sum(s.nbytes for s in large) / seconds if seconds > 0 else None


def picture(spans: Sequence[SpanLike], *, start_s: float, end_s: float, width: int = 100) -> str:
    """One line per lane over [start_s, end_s): the darker, the busier.

    fetch      ▇▇▁▁▇▇▁▁
    compute    ▇▇▇▇▇▇▇▇
    """
    shades = " ▁▂▃▄▅▆▇█"
    step = (end_s - start_s) / width
    rows = []
    for lane in LANES:
        cells = []
        mine = [s for s in spans if s.lane == lane and s.end_s > start_s and s.start_s < end_s]
        for i in range(width):
            a, b = start_s + i * step, start_s + (i + 1) * step
            busy = sum(max(0.0, min(s.end_s, b) - max(s.start_s, a)) for s in mine)
            cells.append(shades[min(8, round(8 * busy / step))])
        rows.append(f"{lane:10} {''.join(cells)}")
    scale = f"{end_s - start_s:.2f} s".rjust(width - 3)
    return "\n".join([*rows, f"{'':10} 0 s{scale}"])
