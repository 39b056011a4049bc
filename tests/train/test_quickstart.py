"""The README's first command: a real pretrained model gets better at held-out rows, and transformers agrees."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from whole import curve

from megatrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quickstart_improves_perplexity_and_the_export_has_it(tmp_path: Path) -> None:
    """Half of its steps, exported as it was trained; scripts/sample.py measures in a process of its own."""
    folder = tmp_path / "run"
    overrides = ("train.steps=50", "output.export_dtype=fp32", "memory.device=cpu")
    options = [word for override in overrides for word in ("--set", override)]
    with pytest.raises(SystemExit) as caught:
        main(["finetune", "quickstart", "--output-dir", str(folder), "--json", "--quiet", *options])
    assert caught.value.code == 0
    summary = json.loads((folder / "run.json").read_text())
    assert summary["eval_loss"] < summary["first_eval_loss"] - 0.5
    assert [step for (step,) in curve(folder, "step", kind="eval")] == [0, 50]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "sample.py"), str(folder)], capture_output=True, text=True, check=True
    )
    found = re.search(r"perplexity on (\d+) held-out rows: ([\d.]+) before, ([\d.]+) after", done.stdout)
    assert found is not None, done.stdout
    rows, before, after = (float(number) for number in found.groups())
    assert rows == 96
    assert before == pytest.approx(math.exp(summary["first_eval_loss"]), abs=0.06)  # printed with one decimal
    assert after == pytest.approx(math.exp(summary["eval_loss"]), abs=0.06)
    assert re.search(r"^after +\w", done.stdout, flags=re.M)
