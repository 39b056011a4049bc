"""metrics.jsonl: what is in it, and that it survives kills, resumes and full disks."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from megatrain.report.events import EvalReport, Event, SaveReport, SkipReport, StepReport
from megatrain.report.metrics import MetricsLog, read_metrics


def step(k: int, *, loss: float = 2.5) -> StepReport:
    return StepReport(
        step=k,
        epoch=k / 10,
        time=1000.0 + k,
        loss=loss,
        aux_loss=None,
        lr=1e-5,
        grad_norm=0.1 + 0.2,
        tokens=100,
        supervised_tokens=40,
        step_s=0.5,
        tokens_per_s=200.0,
        optimizer_s=0.1,
        exposed_optimizer_s=0.0,
        exposed_transfer_s=0.0,
        vram_peak_bytes=0,
        host_peak_bytes=1 << 30,
    )


def evaluation(k: int) -> EvalReport:
    return EvalReport(step=k, epoch=k / 10, time=1000.0 + k, loss=1.0, supervised_tokens=40, eval_s=0.1)


def save(k: int) -> SaveReport:
    return SaveReport(
        step=k,
        epoch=k / 10,
        time=1000.0 + k,
        path=f"step-{k:06}",
        bytes=10,
        save_s=0.1,
        stall_s=0.0,
        weights_sha256="ab",
    )


def open_log(path: Path, warnings: list[str]) -> MetricsLog:
    return MetricsLog(path, warn=warnings.append)


def write(path: Path, *events: Event) -> None:
    log = open_log(path, [])
    for event in events:
        log.write(event)
    log.close()


def names(path: Path) -> list[tuple[object, object]]:
    return [(event["kind"], event["step"]) for event in read_metrics(path)]


def test_a_train_line_has_the_contracts_keys_at_full_precision(tmp_path: Path) -> None:
    write(tmp_path / "m", step(1))
    (event,) = read_metrics(tmp_path / "m")
    wanted = (
        "kind step epoch time loss lr grad_norm tokens supervised_tokens step_s tokens_per_s exposed_optimizer_s "
        "exposed_transfer_s vram_peak_bytes host_peak_bytes"
    )
    assert set(wanted.split()) <= set(event)
    assert event["kind"] == "train"
    assert event["grad_norm"] == 0.1 + 0.2


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    skip = SkipReport(
        3, 0.3, 1003.0, float("nan"), float("inf"), 1e-5, 100, 40, "the loss is nan", ("a: row 1",), ("tail",)
    )
    write(tmp_path / "m", skip, step(4, loss=float("nan")))
    text = (tmp_path / "m").read_text()
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())
    assert (first["loss"], first["grad_norm"], first["reason"]) == (None, None, "the loss is nan")
    assert second["loss"] is None


def test_cut_back_forgets_later_steps_and_unknown_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, evaluation(0), step(1), step(2), evaluation(2), save(2), step(3), evaluation(4), step(4), save(4))
    log = open_log(path, [])
    log.cut_back(step=2, eval_step=0)  # the checkpoint of step 2 was written before its evaluation
    log.write(evaluation(2))
    log.write(step(3))
    log.close()
    assert names(path) == [("eval", 0), ("train", 1), ("train", 2), ("save", 2), ("eval", 2), ("train", 3)]


@pytest.mark.parametrize("stump", [b'{"kind": "tra', b"\x00\x00\x00", b"\n", b'"text"\n', b"[1]\n"])
def test_cut_back_removes_the_stump_of_a_killed_write(tmp_path: Path, stump: bytes) -> None:
    path = tmp_path / "m"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(stump)
    log = open_log(path, [])
    log.cut_back(step=1, eval_step=None)
    log.write(step(2))
    log.close()
    assert names(path) == [("train", 1), ("train", 2)]


def test_a_full_disk_keeps_lines_in_memory_and_writes_them_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, warnings = tmp_path / "m", list[str]()
    log = open_log(path, warnings)
    log.write(step(1))

    real = os.pwrite

    def part_of_a_line(fd: int, data: bytes, offset: int) -> int:
        return real(fd, data[:7], offset)

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", part_of_a_line)
    log.write(step(2))
    assert path.read_bytes().endswith(b"}\n")
    monkeypatch.setattr(os, "pwrite", full)
    log.write(step(3))
    assert len(warnings) == 1, "one warning per trouble, not one per line"
    monkeypatch.setattr(os, "pwrite", real)
    log.write(step(4))
    log.close()
    assert names(path) == [("train", k) for k in (1, 2, 3, 4)]
