"""What a config.json may say, before the code of a model acts on it: a number there is a number of modules to build.

Bounds are far beyond any model there is. They are here so that a damaged or hostile file is refused by name in
milliseconds instead of building a million layers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from megatrain.errors import ModelError
from megatrain.units import format_size

_LARGEST_FILE = 16 << 20
_DEEPEST = 32
_LARGEST_NUMBER = 2**53
_HINT = "check the values in config.json and model.config"


@dataclass(frozen=True)
class _Bound:
    names: re.Pattern[str]
    least: int
    most: int


_BOUNDS = tuple(
    _Bound(re.compile(names), least, most)
    for names, least, most in (
        (r"num_(hidden_|decoder_)?layers|n_layers?|decoder_layers", 1, 1024),
        (r"vocab_size|n_vocab", 1, 2**28),
        (r"hidden_size|n_embd|d_model|embedding_size|hidden_dim", 1, 2**20),
        (r"(\w+_)?intermediate_size|n_inner|d_ff|ffn_dim|ffn_hidden_size", 0, 2**24),
        (r"num_(attention|key_value|kv|query)_heads|n_heads?|num_heads", 0, 2**16),
        (r"head_dim", 1, 2**16),
        (r"\w+_head_dim", 0, 2**16),
        (r"max_position_embeddings|n_positions", 1, _LARGEST_NUMBER),
        (r"n(um)?_(\w+_)?experts", 0, 2**16),
        (r"num_labels", 0, 2**16),
    )
)
_WIDTH_OF_A_HEAD = re.compile(r"(\w+_)?head_(dim|size)")
_CHANCE = re.compile(r"\w*(dropout|pdrop|drop_rate|drop_prob|drop_path)(_rate|_prob|_p)?|layerdrop")


def read_values(folder: Path) -> dict[str, Any]:
    """A folder's config.json as plain values, checked. Raises ModelError naming the file and the key."""
    file = folder / "config.json"
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ModelError(f"{format_size(file.stat().st_size)} are too many for a config", where=str(file))
        values = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ModelError("is nested too deeply", where=str(file)) from error
    except ValueError as error:
        raise ModelError(f"is not JSON: {error}"[:300], where=str(file)) from error
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(file)) from error
    if not isinstance(values, dict):
        raise ModelError("is not a JSON object", where=str(file))
    check_values(values, where=str(file))
    return values


def vocabulary(config: PretrainedConfig) -> int | None:
    """The rows of the embedding; None where the config does not say."""
    value = getattr(config.get_text_config(), "vocab_size", None)
    return value if isinstance(value, int) else None


def check_values(values: Mapping[str, Any], *, where: str) -> None:
    """Raise ModelError for the first value that no model has."""
    for path, key, value in _leaves(values, path="", depth=0, where=where):
        what = _fault(key, value)
        if what is not None:
            raise ModelError(f"{path[:100]} {what}, not {str(value)[:40]}", where=where, hint=_HINT)
    heads = values.get("num_attention_heads"), values.get("head_dim")
    if all(isinstance(number, int) for number in heads) and math.prod(heads) > 2**22:  # type: ignore[arg-type]
        raise ModelError(f"num_attention_heads x head_dim is {math.prod(heads)}", where=where, hint=_HINT)  # type: ignore[arg-type]
    _check_heads(values, where=where)
    if len(values.get("id2label") or ()) > 2**16 if isinstance(values.get("id2label"), Mapping) else False:
        raise ModelError("id2label has too many labels", where=where, hint=_HINT)


def _check_heads(values: Mapping[str, Any], *, where: str) -> None:
    """Heads share keys and values in equal groups, and the hidden state in equal parts where nothing else is said."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    heads, shared, width = (number if isinstance(number := values.get(name), int) else 0 for name in names)
    if heads and shared and heads % shared:
        what = f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({shared})"
        raise ModelError(what, where=where, hint=_HINT)
    given = any(_WIDTH_OF_A_HEAD.fullmatch(name) and value for name, value in values.items())
    if heads and width % heads and not given:
        what = f"num_attention_heads ({heads}) must divide hidden_size ({width}) where no head_dim is given"
        raise ModelError(what, where=where, hint=_HINT)


def _fault(key: str, value: Any) -> str | None:
    if isinstance(value, str) and key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        return "must be a kind of attention, which is no code from the hub" if "/" in value else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if math.isnan(value) if isinstance(value, float) else abs(value) > _LARGEST_NUMBER:
        return "must be a number that a model can have"
    for bound in _BOUNDS:
        if bound.names.fullmatch(key) and not bound.least <= value <= bound.most:
            return f"must be from {bound.least} to {bound.most}"
    if _CHANCE.fullmatch(key) and not 0 <= value < 1:
        return "is a probability and must be at least 0 and less than 1"
    return None


def _leaves(value: Any, *, path: str, depth: int, where: str) -> Iterator[tuple[str, str, Any]]:
    """(dotted path, key, value) of everything that is no mapping or list."""
    if depth > _DEEPEST:
        raise ModelError(f"{path[:100]} is nested too deeply", where=where)
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(child, path=f"{path}.{key}".lstrip("."), depth=depth + 1, where=where)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child, path=path, depth=depth + 1, where=where)
    else:
        yield path, path.rpartition(".")[2], value
