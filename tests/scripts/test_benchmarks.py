"""The benchmark scripts: which points, which words, and that limits of time hold."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import h200_session
import sweep
from timed import TIMED_OUT, Done, run_timed

FOUND: dict[str, Any] = {
    "step_s": 2.0,
    "tokens_per_s": 1000.0,
    "tflops": 400.0,
    "bound_by": "compute",
    "light_share": 0.8,
    "light_by": "compute",
    "estimate": {"step_s": 1.9},
    "optimizer_s": 1.0,
    "exposed_optimizer_s": 0.1,
    "exposed_transfer_s": 0.02,
    "vram_peak_bytes": 2 << 30,
    "vram_planned_bytes": 3 << 30,
    "host_peak_bytes": 4 << 30,
    "host_bytes_per_parameter": 14.4,
    "micro_batches": 4,
    "micro_batch": 16,
    "resident": 3,
    "kept": 0,
    "baselines": [
        {"name": "resident", "tokens_per_s": 500.0, "ratio": 2.0, "failure": None},
        {"name": "fsdp", "ratio": None, "failure": "does not fit in VRAM"},
    ],
}


def test_a_limit_of_time_ends_the_whole_session(tmp_path: Path) -> None:
    inner = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    outer = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {inner!r}])"
    done = run_timed([sys.executable, "-c", outer], limit_s=3)
    assert done.code == TIMED_OUT
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < until:  # a killed process takes a moment to go
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_output_and_status_come_back() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_timed([sys.executable, "-c", code], limit_s=60)
    assert (done.code, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_a_sweep_moves_one_thing_at_a_time() -> None:
    for axes in (sweep.LARGE, sweep.TINY):
        wanted = sweep.points(axes)
        assert wanted[0] == axes.base
        assert len(set(wanted)) == len(wanted)
        for point in wanted[1:]:
            assert sum(a != b for a, b in zip(vars(point).values(), vars(axes.base).values(), strict=True)) == 1
            assert point.tokens % point.seq_len == 0
    assert len(sweep.points(sweep.LARGE)) == 1 + 5 + 5 + 3 + 5


def test_the_sweeps_table_names_failures_and_what_was_left_out() -> None:
    base, *others = sweep.points(sweep.TINY)
    rows = [sweep.Row(base, FOUND, None), sweep.Row(others[0], {}, "does not fit")]
    text = sweep.table(rows, left_out=others[1:2])
    lines = text.splitlines()
    columns = lines[0].count("|")
    assert all(line.count("|") == columns for line in lines[:4])
    assert "| 4 x 16 | 2.000 | 1,000 | 400 | 1.000 | 0.100 / 0.020 | 2.0 GiB | 4.0 GiB | compute | 1.900 |" in lines[2]
    assert "does not fit" in lines[3]
    assert lines[-1] == "No time was left for: seq_len 32."


def test_a_sweep_that_goes_on_measures_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[sweep.Point] = []

    def measure(point: sweep.Point, **_: object) -> sweep.Row | None:
        tried.append(point)
        return None if len(tried) == 4 else sweep.Row(point, FOUND, "does not fit" if len(tried) == 2 else None)

    monkeypatch.setattr(sweep, "measure", measure)
    given: dict[str, Any] = {"model": "m", "extra": ("--set", "a=1"), "steps": 1, "budget_s": 60, "out": tmp_path}
    asked = sweep.words(model="m", extra=("--set", "a=1"), steps=1)
    first, left_out = sweep.sweep(sweep.TINY, **given)
    assert (len(first), len(left_out)) == (3, len(sweep.points(sweep.TINY)) - 3)
    kept = [first[0], first[2]]  # a failure is tried again
    assert sweep.earlier(tmp_path, asked=asked) == kept
    assert sweep.earlier(tmp_path, asked=sweep.words(model="m", extra=(), steps=1)) == []
    rows, left_out = sweep.sweep(sweep.TINY, **given, go_on=True)
    failed, *unknown = sweep.points(sweep.TINY)[1], *sweep.points(sweep.TINY)[3:]
    assert [row.point for row in rows] == [row.point for row in kept] + [failed, *unknown]
    assert left_out == []
    assert sweep.earlier(tmp_path, asked=asked) == rows


def test_a_session_goes_on_after_failures_and_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"print('noise'); print({json.dumps(FOUND)!r})"
    commands = (
        h200_session.python("good", "-c", code, limit_s=60),
        h200_session.python("bad", "-c", "raise SystemExit('error: no such thing')", limit_s=60),
        h200_session.python("slow", "-c", "import time; time.sleep(60)", limit_s=0.5),
        h200_session.python("last", "-c", "print('{out}')", limit_s=60),
    )
    monkeypatch.setitem(h200_session.SECTIONS, "mine", commands)
    record = h200_session.run(["mine"], out=tmp_path, limit_s=100)
    assert [line.partition("**: ")[0] for line in record.lines] == ["* **good", "* **bad", "* **slow", "* **last"]
    assert "2.000 s, 1,000 tok/s" in record.lines[0]
    assert "resident 500 (2.00 x); fsdp: does not fit in VRAM" in record.lines[0]
    assert record.lines[1].endswith("exit code 1; error: no such thing")
    assert "ended at its limit" in record.lines[2]
    assert json.loads((tmp_path / "results.json").read_text()) == {"good": FOUND}
    raw = (tmp_path / "raw.txt").read_text()
    assert all(f"### {command.name}: " in raw for command in commands)
    assert str(tmp_path) in raw.splitlines()


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    record = h200_session.run(["adamw", "packing"], out=tmp_path, limit_s=1)
    assert len(record.lines) == 5
    assert all(line.endswith("left out: no time") for line in record.lines)


def test_every_section_names_files_that_are_there() -> None:
    top = Path(__file__).parents[2]
    later = {"benchmarks/memory_check.py"}
    for commands in h200_session.SECTIONS.values():
        for command in commands:
            for word in command.words:
                if word.startswith("benchmarks/") and word not in later:
                    assert (top / word).exists(), word


def test_the_last_line_is_the_result_or_nothing() -> None:
    assert h200_session.last_object('x\n{"a": 1}\n') == {"a": 1}
    assert (
        h200_session.last_object("") is h200_session.last_object("{broken") is h200_session.last_object("[1]") is None
    )
    assert h200_session.last_words(Done((), 1, "", "", 0.0)) == "it said nothing"
