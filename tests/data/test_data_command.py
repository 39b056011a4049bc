"""`megatrain data`: what is printed, as text and as JSON, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from data_kit import assistant, user, write_jsonl
from typer.testing import CliRunner

from megatrain.cli import data_command
from megatrain.cli.main import app


@pytest.fixture
def chats(tmp_path: Path) -> str:
    rows = [
        {"messages": [user("Who?"), assistant("Moses."), user("And?"), assistant("Aaron.")]},
        {"messages": [user("Who?"), assistant(None)]},
        {"messages": [user("Who?"), assistant("Job. " * 300)]},
    ]
    write_jsonl(tmp_path / "r.jsonl", rows)
    recipe = {
        "model": {"path": "megatrain:kjv-tiny"},
        "data": {"train": str(tmp_path / "r.jsonl"), "max_seq_len": 256, "bad_rows": "skip"},
        "train": {"batch_size": 1},
        "output": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(tmp_path / "recipe.yaml")


def test_text_marks_what_is_trained_and_counts_rows(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert data_command.run(chats, overrides=[], rows=1, json=False) == 0
    out = capsys.readouterr().out
    assert "3 rows read, 2 used" in out
    assert "1 refused:\n" in out
    assert "r.jsonl:2: row 2: the content of message 2 (assistant) is null" in out
    assert "1 truncated:\n" in out
    assert "r.jsonl:3: row 3: " in out
    assert "<|im_start|>assistant\n⟦Moses.<|im_end|>⟧\n<|im_start|>user\nAnd?" in out
    assert out.count("⟦") == 2
    assert "\x1b" not in out


def test_colours_on_a_terminal(chats: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_command, "colours", lambda stream: True)
    data_command.run(chats, overrides=[], rows=1, json=False)
    out = capsys.readouterr().out
    assert "\x1b[32mMoses.<|im_end|>\x1b[0m" in out
    assert "⟦" not in out


def test_json_is_one_object_with_the_same_numbers(chats: str) -> None:
    result = CliRunner().invoke(app, ["data", chats, "--rows", "2", "--json"])
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert (found["status"], found["exit_code"], found["eval"]) == ("ok", 0, None)
    (source,) = found["sources"]
    assert [source[key] for key in ("role", "format", "read", "used")] == ["train", "messages", 3, 2]
    assert source["refused"]["count"] == 1
    assert source["refused"]["rows"][0]["row"] == source["refused"]["rows"][0]["line"] == 2
    assert source["truncated"]["count"] == 1
    train = found["train"]
    assert train["tokens"] == source["tokens"] == sum(row["tokens"] for row in found["rows"])
    assert train["supervised_tokens"] == sum(row["supervised_tokens"] for row in found["rows"])
    assert (train["documents"], train["longest"], train["sequences_per_epoch"]) == (2, 256, 2)
    assert train["filled"] == round(train["tokens"] / 512, 4)
    first = found["rows"][0]
    assert "".join(span["text"] for span in first["spans"]) == first["text"]
    assert [s["text"] for s in first["spans"] if s["supervised"]] == ["Moses.<|im_end|>", "Aaron.<|im_end|>"]
    assert len(found["warnings"]) == 2


def test_overrides_and_failure(chats: str) -> None:
    result = CliRunner().invoke(app, ["data", chats, "--set", "data.bad_rows=error", "--json"])
    assert result.exit_code == 2
    error = json.loads(result.stdout.splitlines()[-1])
    assert (error["status"], error["exit_code"], error["error"]["kind"]) == ("error", 2, "data")
    assert "row 2: the content of message 2 (assistant) is null" in error["error"]["message"]
    assert error["error"]["hint"]


def test_beyond_the_models_positions(chats: str) -> None:
    result = CliRunner().invoke(app, ["data", chats, "--set", "data.max_seq_len=512"])
    assert result.exit_code == 2
    assert "512 is beyond the 256 positions" in result.stderr
