"""What a run changed, seen with transformers alone: perplexity on held-out rows and one answer, before and after.

    python scripts/sample.py RUN            # an output.dir, or the model/ in it

Nothing of the training code is used but the recipe and the data, so this also checks what was exported.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from megatrain.data import Sample, load_tokenizer, prepare
from megatrain.recipe import load_recipe, resolve_asset

WIDTH = 88


@dataclass(frozen=True)
class Seen:
    """What one model makes of the held-out rows."""

    perplexity: float
    answer: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder, or the model/ in it")
    parser.add_argument("--tokens", type=int, default=60, help="longest answer")
    args = parser.parse_args()
    logging.disable_progress_bar()
    model = args.run if (args.run / "config.json").is_file() else args.run / "model"
    if not (model / "config.json").is_file():
        sys.exit(f"{args.run} has no exported model\nhint: finish the run, or `megatrain export` its checkpoint")
    recipe = load_recipe(str(model.parent / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe)
    prepared = prepare(recipe, tokenizer=tokenizer, max_positions=None, vocab_size=None)
    rows = list(prepared.train if prepared.eval is None else prepared.eval)
    of = f"{len(rows)} {'training' if prepared.eval is None else 'held-out'} rows"

    after = look(str(model), rows=rows, tokens=args.tokens)
    if recipe.model.init == "random":
        print(f"perplexity on {of}: {after.perplexity:.1f}")
    else:
        before = look(str(resolve_asset(recipe.model.path)), rows=rows, tokens=args.tokens)
        print(f"perplexity on {of}: {before.perplexity:.1f} before, {after.perplexity:.1f} after")
    show("prompt", tokenizer.decode(prompt_of(rows[0])))
    if recipe.model.init != "random":
        show("before", before.answer)
    show("after", after.answer)


def look(path: str, *, rows: list[Sample], tokens: int) -> Seen:
    """Load a folder or hub id in fp32 on the CPU, measure, and answer the first row greedily."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return Seen(perplexity(model, rows=rows), answer(model, tokenizer, row=rows[0], tokens=tokens))


@torch.inference_mode()
def perplexity(model: PreTrainedModel, *, rows: list[Sample]) -> float:
    """exp of the mean cross-entropy over every supervised token of the rows."""
    total, count = 0.0, 0
    for row in rows:
        ids = torch.from_numpy(row.tokens).long()
        supervised = torch.from_numpy(row.supervised)[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total += float(F.cross_entropy(logits[supervised], ids[1:][supervised], reduction="sum"))
        count += int(supervised.sum())
    return math.exp(total / count)


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, row: Sample, tokens: int) -> str:
    """What the model says where the row's first label begins."""
    prompt = torch.tensor([prompt_of(row)])
    mask = torch.ones_like(prompt)
    out = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))


def prompt_of(row: Sample) -> list[int]:
    first = int(row.supervised.argmax())
    return [int(token) for token in row.tokens[:first]] if first else [int(row.tokens[0])]


def show(label: str, text: str) -> None:
    words = " ".join(text.split()) or "(nothing)"
    print()
    print(textwrap.fill(words, WIDTH, initial_indent=f"{label:<8}", subsequent_indent=" " * 8))


if __name__ == "__main__":
    main()
