"""``megatrain data``: what the model will see, before it sees it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatrain.cli.output import emit, harmless
from megatrain.recipe import load_recipe
from megatrain.report.console import colours

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data import Prepared, Samples
    from megatrain.recipe import Recipe

_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_OPEN, _CLOSE = "⟦", "⟧"  # around what is trained on, where there are no colours
_REASONS = 10  # addresses printed of each kind; --json has more


def run(recipe: str, *, overrides: Sequence[str], rows: int, json: bool) -> int:
    """Prints the account of every source and the first `rows` rows; returns the exit code."""
    from megatrain.data import load_tokenizer, prepare
    from megatrain.model.config_values import vocabulary
    from megatrain.train.model_config import max_positions, read_config

    loaded = load_recipe(recipe, overrides=overrides)
    tokenizer = load_tokenizer(loaded)
    config = read_config(loaded)
    prepared = prepare(loaded, tokenizer=tokenizer, max_positions=max_positions(config), vocab_size=vocabulary(config))
    result = _result(loaded, prepared=prepared, tokenizer=tokenizer, rows=rows)
    if json:
        emit(result)
    else:
        print(_text(result, coloured=colours(sys.stdout)))
    return 0


def _result(recipe: Recipe, *, prepared: Prepared, tokenizer: PreTrainedTokenizerBase, rows: int) -> dict[str, Any]:
    from megatrain.data.show import stretches

    shown = []
    for index in range(min(rows, len(prepared.train))):
        sample = prepared.train[index]
        parts = stretches(sample, tokenizer=tokenizer)
        shown.append(
            {
                "file": sample.file,
                "row": sample.row,
                "tokens": len(sample.tokens),
                "supervised_tokens": int(sample.supervised.sum()),
                "text": "".join(part.text for part in parts),
                "spans": [{"text": part.text, "supervised": part.supervised} for part in parts],
            }
        )
    return {
        "status": "ok",
        "exit_code": 0,
        **prepared.report.to_dict(),
        "train": _totals(recipe, prepared.train),
        "eval": None if prepared.eval is None else _totals(recipe, prepared.eval),
        "rows": shown,
        "warnings": prepared.report.warnings(),
    }


def _totals(recipe: Recipe, samples: Samples) -> dict[str, Any]:
    """Numbers of the first epoch. `filled`: the share of its sequences that is no padding (packed ones only)."""
    from megatrain.data import Loader

    data = recipe.data
    loader = Loader.of(samples, recipe=recipe)
    sequences = loader.rows_in_epoch(0)
    lengths = samples.lengths
    drawn = loader.tokens_in_epoch(0)
    return {
        "documents": len(samples),
        "tokens": samples.token_count,
        "supervised_tokens": samples.supervised_count,
        "longest": int(lengths.max(initial=0)),
        "mean": round(float(lengths.mean()), 1) if len(samples) else 0.0,
        "sequences_per_epoch": sequences,
        "steps_per_epoch": loader.steps_in_epoch(0),
        "filled": round(drawn / (sequences * data.max_seq_len), 4) if data.packing and sequences else None,
    }


def _text(result: dict[str, Any], *, coloured: bool) -> str:
    lines = []
    for source in result["sources"]:
        lines.append(f"{source['role']}: {source['path']} ({source['format']})")
        lines.append(
            f"  {source['read']:,} rows read, {source['used']:,} used: "
            f"{source['tokens']:,} tokens, {source['supervised_tokens']:,} of them supervised"
        )
        lines += [f"  not read, its name announces no split: {name}" for name in source["files_left_out"][:_REASONS]]
        for key, what in (
            ("refused", "refused"),
            ("long", "left out as too long"),
            ("truncated", "truncated"),
            ("split", "split"),
            ("tools_unprinted", "used without their tools, which the chat template does not print"),
        ):
            lines += _tally(source[key], what=what)
    for role in ("train", "eval"):
        if result[role] is not None:
            lines += _totals_text(result[role], role=role)
    for row in result["rows"]:
        head = f"{row['file']}: row {row['row']}: {row['tokens']} tokens, {row['supervised_tokens']} supervised"
        lines += ["", f"{_DIM}{head}{_RESET}" if coloured else head]
        lines.append("".join(_span(span, coloured=coloured) for span in row["spans"]))
    return "\n".join(lines)


def _tally(tally: dict[str, Any], *, what: str) -> list[str]:
    if not tally["count"]:
        return []
    lines = [f"  {tally['count']:,} {what}:"]
    for row in tally["rows"][:_REASONS]:
        place = row["file"] if row["line"] is None else f"{row['file']}:{row['line']}"
        lines.append(harmless(f"    {place}: row {row['row']}: {row['reason']}"))
    if tally["count"] > _REASONS:
        lines.append(f"    and {tally['count'] - _REASONS:,} more")
    return lines


def _totals_text(totals: dict[str, Any], *, role: str) -> list[str]:
    filled = "" if totals["filled"] is None else f", {totals['filled']:.1%} filled"
    return [
        f"{role}: {totals['documents']:,} documents of {totals['mean']:,} tokens on average, "
        f"{totals['longest']:,} at most",
        f"  an epoch: {totals['sequences_per_epoch']:,} sequences{filled}, {totals['steps_per_epoch']:,} steps",
    ]


def _span(span: dict[str, Any], *, coloured: bool) -> str:
    text = harmless(str(span["text"]))
    if not span["supervised"]:
        return text
    return f"{_GREEN}{text}{_RESET}" if coloured else f"{_OPEN}{text}{_CLOSE}"
