"""What a person sees: plain lines without escape codes off a terminal, a live panel on one."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace

import pytest
from test_metrics import evaluation, save, step

from megatrain.report.console import Console, PlainConsole, QuietConsole, open_console
from megatrain.report.events import SkipReport
from megatrain.report.live import LiveConsole
from megatrain.report.text import clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tell_everything(console: Console) -> None:
    console.phase("reading data")
    console.progress("loading", done=5, total=10)
    console.progress("loading", done=10, total=10)
    console.note("8 rows")
    console.warn("one row was refused")
    console.begin(first_step=1, total_steps=4)
    console.step(step(1))
    console.skipped(
        SkipReport(2, 0.2, 0.0, float("nan"), 1.0, 1e-5, 10, 5, "the loss is nan", ("a: row 1",), ("tail",))
    )
    console.evaluated(evaluation(2))
    console.saved(save(2))
    console.step(step(3))
    console.close()
    console.close()


def test_plain_lines_have_no_escape_codes_and_tell_it_all() -> None:
    stream = io.StringIO()
    tell_everything(PlainConsole(stream))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    assert "step 1/4  loss 2.5000  lr 1.00e-05  grad norm 0.300  200 tok/s" in text
    assert "warning: step 2: the loss is nan; the step was skipped and touched no weight" in text
    assert "eval after step 2  loss 1.0000  perplexity 2.72" in text
    assert "saved step-000002" in text


def test_plain_progress_is_told_only_when_it_takes_long() -> None:
    time_s = 0.0
    stream = io.StringIO()
    console = PlainConsole(stream, now=lambda: time_s)
    console.phase("reading")
    for done in range(101):
        time_s = 0.01 * done
        console.progress("weights", done=done, total=100)
    assert stream.getvalue().splitlines() == ["reading"]
    console.phase("reading")
    for done in range(101):
        time_s = 100.0 + 0.3 * done
        console.progress("weights", done=done, total=100)
    told = stream.getvalue().splitlines()[2:]
    assert told[0] == "weights: 10 %"
    assert 4 <= len(told) <= 6
    assert "weights: 100 %" not in told
    before = len(stream.getvalue().splitlines())
    for done in range(10):  # a second time without a phase of its own, as evaluations come
        time_s = 200.0 + 10 * done
        console.progress("evaluating", done=done, total=10)
    assert stream.getvalue().splitlines()[before:] == [f"evaluating: {10 * n} %" for n in range(1, 10)]


def test_quiet_keeps_the_warnings() -> None:
    stream = io.StringIO()
    tell_everything(QuietConsole(stream))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("warning: ") for line in lines)


def test_the_live_display_shows_how_far_the_machines_limit_is() -> None:
    stream = Terminal()
    console = LiveConsole(stream)
    console.begin(first_step=1, total_steps=4)
    console.step(replace(step(1), optimizer_s=0.4, exposed_optimizer_s=0.3, limit_share=0.83))
    console.close()
    assert "bound by optimizer (83 % of the machine's limit)" in unstyled(stream.getvalue())


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_live_display_shows_the_step_and_gives_the_cursor_back() -> None:
    stream = Terminal()
    tell_everything(LiveConsole(stream))
    text = stream.getvalue()
    assert "bound by compute (100 % computing)" in unstyled(text)
    assert text.count("\x1b[?25h") >= text.count("\x1b[?25l") > 0


@pytest.mark.parametrize(
    ("terminal", "environment", "quiet", "kind"),
    [
        (True, {}, False, LiveConsole),
        (True, {"NO_COLOR": "1"}, False, PlainConsole),
        (True, {"NO_COLOR": ""}, False, LiveConsole),  # as the convention has it
        (True, {"TERM": "dumb"}, False, PlainConsole),
        (True, {}, True, QuietConsole),
        (False, {}, False, PlainConsole),
    ],
)
def test_the_console_fits_where_stderr_goes(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], quiet: bool, kind: type
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    console = open_console(quiet=quiet)
    console.close()
    assert type(console) is kind


def test_time_left_follows_the_steps_and_not_the_warm_up() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.begin(first_step=1, total_steps=101)
    slow = step(1).__class__(**{**step(1).__dict__, "step_s": 60.0})
    console.step(slow)
    console.step(step(2))  # 0.5 s
    assert "left 0:50" in stream.getvalue().splitlines()[-1]  # 99 steps of half a second


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (42, "0:42"), (3723, "1:02:03"), (183840, "2d 03:04"), (59.6, "1:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
