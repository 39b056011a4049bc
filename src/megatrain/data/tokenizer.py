"""The tokenizer that a recipe names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatrain.data.growth import Growth
from megatrain.data.records import BadRow
from megatrain.errors import DataError
from megatrain.model import hub
from megatrain.recipe import resolve_asset
from megatrain.units import format_size

if TYPE_CHECKING:
    from megatrain.recipe import Recipe

_LARGEST = 1 << 30  # bytes of a tokenizer.json; the largest known ones have a twentieth of it
_MOST_ADDED = 1024  # tokens around a text; one or two are usual
_INLINE = ("{{", "{%", "\n")  # what tells a template from the name of a file


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer with the recipe's chat template, ready to encode whole texts. Raises DataError."""
    path = recipe.tokenizer.path or recipe.model.path
    key = "tokenizer.path" if recipe.tokenizer.path else "model.path"
    name = str(resolve_asset(path))
    local = Path(name).expanduser()
    if local.is_dir() and not any(local.glob("*token*")) and not any(local.glob("vocab.*")):
        hint = "copy the model's tokenizer.json and tokenizer_config.json into it, or set tokenizer.path"
        raise DataError("the folder holds no tokenizer", where=f"{key} ({path})", hint=hint)
    revision = None if recipe.tokenizer.path else recipe.model.revision
    if hub.is_hub_id(name):
        cached = hub.cached_folder(name, revision=revision or "main", file="tokenizer.json")
        if cached is None and not hub.reachable():
            raise DataError(
                f"{path} is neither a folder here nor in the cache, and the hub cannot be reached",
                where=key,
                hint="check the spelling and the network, or set tokenizer.path to a folder with a tokenizer.json",
            )
        local = cached or local
    _check_file(local / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(local) if local.is_dir() else name,
            revision=revision,
            trust_remote_code=recipe.model.trust_remote_code,
            local_files_only=local.is_dir(),
        )
    except BaseException as error:  # a damaged file meets any of its assumptions, and those of Rust code panic
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"no tokenizer can be had from {path}: {reason}",
            where=key,
            hint="a folder needs tokenizer.json; a hub id needs the network, or must have been downloaded before",
        ) from error
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, and labels need that",
            where=key,
            hint="use a tokenizer with a tokenizer.json (a fast one)",
        )
    _check_template(tokenizer, where=f"{key} ({path})")
    if recipe.tokenizer.chat_template is not None:
        tokenizer.chat_template = _template_text(recipe.tokenizer.chat_template)
    # A length or a padding that was saved with the tokenizer would cut rows behind our back.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up. Its exception is no Exception, and has no name to import."""
    return type(error).__module__ == "pyo3_runtime" and type(error).__name__ == "PanicException"


def _check_file(file: Path) -> None:
    """Refuse what would take all memory when it is loaded: the library normalizes added tokens then, and cannot be
    interrupted. What it makes of rows is looked at row by row, see growth.py."""
    size = file.stat().st_size if file.is_file() else 0
    if size > _LARGEST:
        raise DataError(f"a tokenizer of {format_size(size)} is no tokenizer", where=str(file))
    values = _read_object(file) if size else {}
    normalizer, added = values.get("normalizer"), values.get("added_tokens")
    growth = Growth.of(normalizer if isinstance(normalizer, dict) else None)
    if growth.is_bounded or not isinstance(added, list):
        return
    for token in added:
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            try:
                growth.check(token["content"])
            except BadRow as reason:
                raise DataError(f"added token {str(token['content'])[:40]!r}: {reason}", where=str(file)) from None


def _read_object(file: Path) -> dict[str, Any]:
    """An empty one for what is no JSON: the library says what is wrong with it."""
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _check_template(tokenizer: PreTrainedTokenizerBase, *, where: str) -> None:
    added = tokenizer.backend_tokenizer.num_special_tokens_to_add(False)
    if added > _MOST_ADDED:
        raise DataError(
            f"the tokenizer adds {added:,} tokens to every text, and {_MOST_ADDED} are the limit", where=where
        )


def _template_text(template: str) -> str:
    if any(mark in template for mark in _INLINE):
        return template
    try:
        if Path(template).exists() and not Path(template).is_file():
            raise DataError(f"{template!r} is not a file", where="tokenizer.chat_template")
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(
            f"the chat template cannot be read: {reason or error}",
            where="tokenizer.chat_template",
            hint=f"{template!r} is neither a file nor a template (which has {{{{ }}}} or {{% %}} in it)",
        ) from error
