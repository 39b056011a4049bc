"""The shipped model and data are there, readable, and named in the notice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatrain.recipe import resolve_asset

ROWS = {"devil.jsonl": (964, "instruction"), "kjv.jsonl": (1189, "text"), "chatbot.jsonl": (2025, "messages")}


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize(("name", "expected"), ROWS.items())
def test_data_has_its_rows(name: str, expected: tuple[int, str]) -> None:
    count, column = expected
    read = rows(resolve_asset(f"megatrain:{name}"))
    assert len(read) == count
    assert all(row[column] for row in read)


def test_the_notice_names_everything_that_is_shipped() -> None:
    folder = resolve_asset("megatrain:kjv-tiny").parent
    notice = (folder / "NOTICE").read_text()
    shipped = {path.name for path in folder.iterdir()} - {"NOTICE"}
    assert shipped == {"kjv-tiny", *ROWS}
    assert all(name in notice for name in shipped)
    assert "Redistribution and use in source and binary forms" in notice  # the licence of chatbot.jsonl


def test_held_out_chapters_are_every_twentieth() -> None:
    held = rows(resolve_asset("megatrain:kjv-tiny") / "eval.jsonl")
    assert held == rows(resolve_asset("megatrain:kjv.jsonl"))[::20]


@pytest.mark.slow
def test_kjv_tiny_has_the_perplexity_that_its_readme_states() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_asset("megatrain:kjv-tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "".join(str(row["text"]) + tokenizer.eos_token for row in rows(folder / "eval.jsonl"))
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    blocks = ids[: len(ids) // 256 * 256].view(-1, 256)
    with torch.inference_mode():
        losses = [float(model(input_ids=block[None], labels=block[None]).loss) for block in blocks]
    assert math.exp(sum(losses) / len(losses)) == pytest.approx(19.9, rel=0.05)
