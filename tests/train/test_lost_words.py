"""What is said on stderr may get lost, and takes nothing with it; what stdout cannot take is no bug of ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TextIO

import pytest
from chaos import write_recipe
from whole import write_rows

from megatrain.cli.main import main


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, rows=write_rows(tmp_path / "rows.jsonl"))


def command(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    return caught.value.code


def broken_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")


@pytest.mark.parametrize("stream", [full_disk, broken_pipe, lambda: None])
def test_a_run_outlives_its_log(
    tmp_path: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    assert callable(stream)
    monkeypatch.setattr(sys, "stderr", stream())
    assert command("finetune", str(recipe), "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.parametrize("stream", [full_disk, broken_pipe])
def test_a_failure_that_stdout_does_not_take_keeps_its_exit_code(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    assert callable(stream)
    monkeypatch.setattr(sys, "stdout", stream())
    assert command("recipe", "show", "nowhere.yaml", "--json") == 2
    assert "Traceback" not in capsys.readouterr().err
