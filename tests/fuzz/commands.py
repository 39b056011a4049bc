"""Runs the command line in this process and reads what it says of a failure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain.cli.main import main

KJV = "megatrain:kjv-tiny"


@dataclass(frozen=True)
class Answer:
    code: int
    result: dict[str, Any]

    @property
    def message(self) -> str:
        error = self.result["error"]
        return f"{error['where']}: {error['message']}"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """The exit code and the JSON object of a command; no traceback, and the code is in the object too."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert "Traceback" not in err
    assert caught.value.code == result["exit_code"]
    return Answer(result["exit_code"], result)


def write_recipe(folder: Path, *, model: str = KJV, train: Any = "megatrain:devil.jsonl", **sections: Any) -> str:
    """A recipe that runs unless what is given stops it."""
    data = {"train": train, "max_seq_len": 64, **sections.pop("data", {})}
    values = {"model": {"path": model}, "data": data, "output": {"dir": str(folder / "run")}, **sections}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)
