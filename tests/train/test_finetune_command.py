"""The command: exit codes, one JSON object on the last line, and signals to real processes in every phase."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chaos import Chaos, start, write_recipe
from whole import curve, state, weights, write_rows

from megatrain.cli.main import main
from megatrain.train.rundir import RunDir
from megatrain.train.session import Session
from megatrain.units import format_size


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, rows=write_rows(tmp_path / "rows.jsonl"))


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """stdout is one JSON object and nothing else."""
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    parsed: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    return parsed


def test_the_totals_of_a_dry_run_are_those_of_its_purposes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("finetune", str(recipe), "--dry-run", "--json") == 0
    plan = last_line(capsys)["plan"]
    assert command("finetune", str(recipe), "--dry-run") == 0
    text = capsys.readouterr().out
    computing = sum(plan["device"].values())
    assert f"host memory: {format_size(sum(plan['host'].values()) + computing)}\n" in text
    assert f"compute, in host memory: {format_size(computing)}\n" in text


def test_json_of_a_run_a_refusal_and_a_finished_run(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("finetune", str(recipe), "--dry-run", "--json") == 0
    assert last_line(capsys)["status"] == "dry-run"
    assert not (tmp_path / "run").exists()

    assert command("finetune", str(recipe), "--json", "--quiet") == 0
    done = last_line(capsys)
    assert done == json.loads((tmp_path / "run" / "run.json").read_text())
    wanted = (
        "status exit_code steps epochs tokens supervised_tokens first_loss last_loss eval_loss tokens_per_s wall_s "
        "vram_peak_bytes host_peak_bytes checkpoint model versions"
    )
    assert set(wanted.split()) <= set(done)

    assert command("finetune", str(recipe), "--json") == 2
    refused = last_line(capsys)
    assert set(refused) == {"status", "exit_code", "error"}
    assert (refused["status"], refused["exit_code"], refused["error"]["kind"]) == ("error", 2, "usage")
    assert "--resume auto" in refused["error"]["hint"]

    assert command("finetune", str(recipe), "--json", "--resume", "auto") == 0
    assert last_line(capsys) == done

    assert command("export", str(tmp_path / "run"), str(tmp_path / "out"), "--json") == 0
    assert last_line(capsys)["step"] == done["steps"]
    assert command("export", str(tmp_path / "run"), str(tmp_path / "out"), "--json") == 2
    assert last_line(capsys)["error"]["message"] == "holds a model already"
    assert command("export", str(tmp_path / "rows.jsonl"), str(tmp_path / "out2"), "--json") == 2
    assert last_line(capsys)["error"]["kind"] == "usage"
    assert command("export", str(tmp_path / "absent"), str(tmp_path / "out2"), "--json") == 2
    assert last_line(capsys)["error"]["message"] == "there is no such folder"
    assert command("export", str(tmp_path / "run"), str(tmp_path), "--json") == 2
    assert "something else than a model" in last_line(capsys)["error"]["message"]


def test_a_failure_is_told_once_and_is_in_run_json(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not fit: exit 3 with the numbers, before a step, and the folder may be used again."""
    assert command("finetune", str(recipe), "--json", "--set", "memory.host=1000") == 3
    captured = capsys.readouterr()
    error = json.loads(captured.out)
    assert error == json.loads((tmp_path / "run" / "run.json").read_text())
    assert error["error"]["kind"] == "does_not_fit"
    assert captured.err.count("error: ") == 1


def test_a_bug_of_ours_leaves_its_traceback_in_the_folder(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(self: Session, start: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Session, "_train", bug)
    assert command("finetune", str(recipe), "--json") == 1
    captured = capsys.readouterr()
    assert "ZeroDivisionError: oops" in (tmp_path / "run" / "crash.txt").read_text()
    assert json.loads(captured.out)["error"]["kind"] == "internal"
    assert "Traceback" not in captured.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_code"] == 1


def test_a_second_process_is_refused_while_the_first_works(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir(tmp_path / "run").locked():
        for option in ("--json", "--dry-run"):
            assert command("finetune", str(recipe), "--json", option) == 2
            assert f"process {os.getpid()}" in last_line(capsys)["error"]["message"]


# -- real processes ---------------------------------------------------------------------------------------


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith(text):
            return "".join(seen)
    raise AssertionError(f"it never said {text!r}:\n{''.join(seen)}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(write_recipe(folder, rows=write_rows(folder / "rows.jsonl")))
    _, err = process.communicate()
    assert process.returncode == 0, err
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "signum"),
    [
        ("reading and tokenising", signal.SIGINT),
        ("reading the model's structure", signal.SIGTERM),
        ("taking memory", signal.SIGHUP),
        ("eval after step 0", signal.SIGINT),
        ("step 1/", signal.SIGTERM),
        ("step 5/", signal.SIGHUP),
        ("eval after step 3", signal.SIGINT),
        ("writing the checkpoint of step 4", signal.SIGTERM),
        ("exporting", signal.SIGHUP),
    ],
)
def test_a_signal_in_every_phase_stops_it_and_the_resume_is_exact(
    tmp_path: Path, recipe: Path, undisturbed: Path, phase: str, signum: signal.Signals
) -> None:
    process = start(recipe, "--json")
    read_until(process, phase)
    process.send_signal(signum)
    begin_s = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, err
    assert time.monotonic() - begin_s < 15
    told = json.loads(out)
    assert (told["status"], told["exit_code"]) == ("interrupted", 128 + signum)
    if phase == "step 5/":
        assert told["checkpoint"].endswith("step-000005") or told["checkpoint"].endswith("step-000006")
    process = start(recipe)
    _, err = process.communicate()
    assert process.returncode == 0, err
    run = tmp_path / "run"
    assert weights(run) == weights(undisturbed)
    assert state(run) == state(undisturbed)
    assert curve(run, "step", "loss", "lr") == curve(undisturbed, "step", "loss", "lr")
    assert curve(run, "step", "loss", kind="eval") == curve(undisturbed, "step", "loss", kind="eval")


@pytest.mark.slow
def test_the_second_signal_stops_it_within_two_seconds(tmp_path: Path, recipe: Path, undisturbed: Path) -> None:
    process = start(recipe)
    read_until(process, "step 5/")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    begin_s = time.monotonic()
    process.communicate(timeout=10)
    assert time.monotonic() - begin_s < 2
    assert process.returncode in (130, 143)
    process = start(recipe)
    process.communicate()
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_is_read_changes_nothing(tmp_path: Path, recipe: Path, undisturbed: Path) -> None:
    process = start(recipe)
    read_until(process, "saved")
    process.kill()
    process.communicate()
    for phase in ("resuming", "taking memory"):
        process = start(recipe)
        read_until(process, phase)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143, err
    process = start(recipe)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.slow
def test_a_signal_while_a_long_data_set_is_tokenised(tmp_path: Path) -> None:
    """Far more rows than can be tokenised until it comes."""
    rows = write_rows(tmp_path / "rows.jsonl", words=[f"word{n}" for n in range(300_000)])
    process = start(write_recipe(tmp_path, rows=rows), "--json")
    read_until(process, "reading and tokenising")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    begin_s = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["status"]) == (130, "interrupted"), err
    assert time.monotonic() - begin_s < 15


def test_a_few_random_kills() -> None:
    """A taste of what tests/train/chaos.py does at length; its processes are forks, which have their imports."""
    command = [sys.executable, str(Path(__file__).with_name("chaos.py")), "--kills", "2", "--seed", "7", "--forks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_random_kills(tmp_path: Path) -> None:
    """The same with whole processes."""
    tally = Chaos(tmp_path, seed=3, span_s=6.0, forks=0).run(8)
    assert not tally.problems
    assert sum(tally.kills.values()) >= 8
