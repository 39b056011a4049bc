"""A resume reads its checkpoint to where it stays: its peak is that of a fresh run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chaos import start
from transformers import LlamaConfig
from whole import whole_recipe, write_rows


@pytest.mark.slow
def test_the_peak_of_a_resume_is_that_of_a_fresh_run(tmp_path: Path) -> None:
    """Half a GB of state in layers of 50 MB: a second copy of one of them would show."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=10,
        num_attention_heads=8,
        max_position_embeddings=256,
    )
    config.save_pretrained(tmp_path / "model")
    recipe = whole_recipe(
        tmp_path / "run",
        rows=write_rows(tmp_path / "rows.jsonl"),
        model={"path": str(tmp_path / "model"), "init": "random", "config": {}},
        tokenizer={"path": "megatrain:kjv-tiny"},
        train={"epochs": None, "steps": 2},
        output={"dir": str(tmp_path / "run"), "export": False},
    )
    peaks = []
    for steps in (2, 4):
        path = tmp_path / f"{steps}.yaml"
        path.write_text(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps})}).to_yaml())
        process = start(path, "--json")
        out, err = process.communicate()
        assert process.returncode == 0, err
        report = json.loads(out)
        assert report["steps"] == steps
        peaks.append(report["host_peak_bytes"])
    checkpoint = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoints" / "step-000004").iterdir())
    assert checkpoint > 400 << 20
    assert peaks[1] <= 1.05 * peaks[0]
