"""How much longer a tokenizer's normalizer may make a text. tokenizer.json comes from anywhere, and a chain of
replacements that each double a letter asks for more memory than there is, in code that cannot be interrupted.

A normalizer is judged by its steps. One that can never multiply a text by more than MOST_GROWTH, as all of those that
models come with, costs nothing. With any other each row goes through step by step, and the size of the next text is
known before it is made.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from megatrain.data.records import BadRow

MOST_GROWTH = 64
"""Characters that a character of a row may become. NFKC makes 18 of one in the worst case."""
MORE = 4096
"""Characters that a row may gain beside that."""
_FACTORS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 36, "ByteLevel": 4}
"""Of the steps whose tables are Unicode's: at most so many characters for one. Others make none longer."""


@dataclass(frozen=True)
class Growth:
    """What `steps` do to a text, as tokenizer.json writes them. Empty: nothing."""

    steps: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, normalizer: Mapping[str, Any] | None) -> Growth:
        return cls(tuple(_flat(normalizer)))

    @classmethod
    def of_backend(cls, backend: Any) -> Growth:
        """backend: a `tokenizers.Tokenizer`."""
        return cls.of(None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__()))

    @cached_property
    def is_bounded(self) -> bool:
        """Whether no text at all can grow beyond the limit."""
        factor, more = 1, 0
        for step in self.steps:
            by, plus = _most(step)
            factor, more = factor * by, more * by + plus
        return factor <= MOST_GROWTH and more <= MORE

    def check(self, text: str) -> None:
        """Raises BadRow for a text that would become too long."""
        if self.is_bounded:
            return
        limit = MOST_GROWTH * len(text) + MORE
        for step in self.steps:
            length = _next_length(step, text)
            if length > limit:
                raise BadRow(
                    f"the tokenizer's normalizer makes {length:,} or more characters of its text, and {MOST_GROWTH} "
                    "for each character are the limit"
                )
            text = _applied(step, text)


def _flat(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step.get("type") == "Sequence":
        for inner in step.get("normalizers", ()):
            yield from _flat(inner)
    else:
        yield step


def _most(step: Mapping[str, Any]) -> tuple[int, int]:
    """(factor, more): a text of n characters becomes one of factor * n + more at most."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(content)} if found:
            return max(1, -(-len(content) // len(found))), 0
        case {"type": "Replace", "content": str(content)}:  # an expression may match before each character
            return 1 + len(content), len(content)
        case {"type": "Prepend", "prepend": str(prepend)}:
            return 1, len(prepend)
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _longest_entry(table), 0
        case {"type": str(kind)}:
            return _FACTORS.get(kind, 1), 0
    return 1, 0


def _longest_entry(table: str) -> int:
    """Of SentencePiece's table: the size of a trie, the trie, and the texts that it leads to, each ended by a zero.

    In characters: the longest of the tables that models come with is 18 of them, in 33 bytes.
    """
    try:
        raw = base64.b64decode(table)
    except (binascii.Error, ValueError):
        return 1  # the library refuses it
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _next_length(step: Mapping[str, Any], text: str) -> int:
    """Characters after the step: exact for plain replacements, otherwise at most."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(content)} if found:
            return len(text) + text.count(found) * (len(content) - len(found))
    factor, more = _most(step)
    return factor * len(text) + more


def _applied(step: Mapping[str, Any], text: str) -> str:
    made = Tokenizer.from_str(json.dumps(_BARE | {"normalizer": step})).normalizer.normalize_str(text)
    return str(made)


_BARE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
}
