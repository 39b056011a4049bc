"""Tokenizers that make a book of a letter: refused with the row, before the memory is asked for."""

from __future__ import annotations

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from data.data_kit import byte_tokenizer, prepared, recipe, texts, write_jsonl
from fuzz.guard import bounded
from megatrain.data import load_tokenizer
from megatrain.data.growth import MORE, MOST_GROWTH, Growth, _applied, _next_length
from megatrain.data.records import BadRow
from megatrain.errors import DataError

Step = dict[str, Any]
DOUBLE: Step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMBS: dict[str, list[Step]] = {
    "doubled forty times": [DOUBLE] * 40,
    "doubled, in boxes": [{"type": "Sequence", "normalizers": [DOUBLE] * 10} for _ in range(4)],
    "a long word for a letter": [{"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10_000}] * 3,
    "an expression that matches everywhere": [{"type": "Replace", "pattern": {"Regex": "x*"}, "content": "ab"}] * 30,
    "a nothing that is found everywhere": [{"type": "Replace", "pattern": {"String": ""}, "content": "ab"}] * 30,
    "a long beginning": [{"type": "Prepend", "prepend": "a" * 5_000}, DOUBLE],
}
SPACES: Step = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
USUAL: dict[str, list[Step]] = {
    "none": [],
    "llama 2": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
    "bert": [{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
              "lowercase": True}],
    "nfkc and spaces": [{"type": "NFKC"}, SPACES],
    "nfc": [{"type": "NFC"}],
}  # fmt: skip


def with_steps(steps: list[Step]) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    values["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(values))
    return tokenizer


@pytest.mark.parametrize("bomb", BOMBS)
def test_the_row_that_would_explode_is_named(tmp_path: Path, bomb: str) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", [{"text": "no such letter"}, {"text": "a"}])
    needs_letter = all(
        step.get("pattern") == {"String": "a"}
        for step in Growth.of({"type": "Sequence", "normalizers": BOMBS[bomb]}).steps
    )
    with bounded(), pytest.raises(DataError, match="the tokenizer's normalizer makes") as caught:
        prepared(path, tokenizer=with_steps(BOMBS[bomb]))
    assert f"r.jsonl:{1 + needs_letter}: row {1 + needs_letter}: " in str(caught.value)
    assert f"{MOST_GROWTH} for each character are the limit" in str(caught.value)


def test_such_rows_can_be_skipped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", [{"text": "one"}, {"text": "a"}, {"text": "two"}])
    tokenizer = with_steps(BOMBS["doubled forty times"])
    found = prepared(path, tokenizer=tokenizer, bad_rows="skip")
    assert found.report.sources[0].refused.count == 1
    assert [text.removesuffix("</s>") for text in texts(found.train, tokenizer=tokenizer)] == ["one", "two"]


@pytest.mark.parametrize("name", USUAL)
def test_what_models_come_with_is_never_looked_at_row_by_row(name: str) -> None:
    growth = Growth.of({"type": "Sequence", "normalizers": USUAL[name]})
    assert growth.is_bounded
    growth.check("a" * 1000)


def test_the_table_of_sentencepiece_counts_characters() -> None:
    longest = unicodedata.normalize("NFKC", "\ufdfa")  # of what its own tables make of one letter; t5, albert, xlm-r
    assert (len(longest), len(longest.encode())) == (18, 33)
    table = (4).to_bytes(4, "little") + bytes(4) + longest.encode() + b"\0"
    step: Step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    assert Growth.of({"type": "Sequence", "normalizers": [step, SPACES]}).is_bounded
    assert not Growth.of({"type": "Sequence", "normalizers": [step, SPACES, SPACES]}).is_bounded


def test_the_limit_is_where_it_is_said_to_be() -> None:
    word: Step = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * (MOST_GROWTH + 1)}
    growth = Growth.of(word)
    assert not growth.is_bounded
    growth.check("a" * MORE)
    with pytest.raises(BadRow):
        growth.check("a" * (MORE + 1))
    growth.check("a" + "c" * 10**6)  # a replacement that is rare does no harm


STEPS = st.one_of(
    st.builds(
        lambda found, content: {"type": "Replace", "pattern": {"String": found}, "content": content},
        st.text("ab ", max_size=2),
        st.text("abc", max_size=5),
    ),
    st.builds(
        lambda found, content: {"type": "Replace", "pattern": {"Regex": found}, "content": content},
        st.sampled_from(["a*", "b", " {2,}", "^", "$", r"\b", "(a|b)*"]),
        st.text("abc", max_size=5),
    ),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, st.text("ab", min_size=1, max_size=4)),
    st.sampled_from([{"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")]),
    st.sampled_from(
        [USUAL["bert"][0], {"type": "ByteLevel"}, {"type": "Strip", "strip_left": True, "strip_right": True}]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    step=STEPS, text=st.text(st.one_of(st.sampled_from("ab ﷺİΐ한日\u0344"), st.characters(codec="utf-8")), max_size=12)
)
def test_no_step_makes_more_than_was_foreseen(step: Step, text: str) -> None:
    made = len(_applied(step, text))
    assert made <= _next_length(step, text)
    found = step.get("pattern", {}).get("String")
    if found:
        assert made == _next_length(step, text)


# --- while it is loaded ----------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, **changes: Any) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path / "tokenizer"


def loaded(folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(recipe("unused", sections={"tokenizer": {"path": str(folder)}}))  # type: ignore[return-value]


def test_an_added_token_that_would_explode(tmp_path: Path) -> None:
    """The library normalizes those when it reads the file."""
    token = {"id": 300, "content": "aaa", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
             "special": False}  # fmt: skip
    steps = {"type": "Sequence", "normalizers": [DOUBLE] * 40}
    folder = folder_with(tmp_path, normalizer=steps, added_tokens=[token])
    with bounded(), pytest.raises(DataError, match=r"added token 'aaa': the tokenizer's normalizer makes") as caught:
        loaded(folder)
    assert caught.value.where == str(folder / "tokenizer.json")


def test_a_text_that_is_surrounded_by_thousands_of_tokens(tmp_path: Path) -> None:
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 5000 + [{"Sequence": {"id": "A", "type_id": 0}}]
    known = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    post = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    with pytest.raises(DataError, match="adds 5,000 tokens to every text, and 1024 are the limit"):
        loaded(folder_with(tmp_path, post_processor=post))


@pytest.mark.parametrize("name", USUAL)
def test_what_models_come_with_is_loaded(tmp_path: Path, name: str) -> None:
    steps = USUAL[name]
    tokenizer = loaded(folder_with(tmp_path, normalizer={"type": "Sequence", "normalizers": steps} if steps else None))
    assert len(tokenizer.encode("in the beginning")) > 5
