"""YAML as people write it: 1.1 against 1.2, duplicate keys, things that are not YAML at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_files import MINIMAL, refusal

from megatrain.errors import RecipeError
from megatrain.recipe import Recipe, load_recipe

Write = Callable[..., str]


def optimizer(text: str) -> str:
    return f"{MINIMAL}optimizer:\n  {text}\n"


@pytest.mark.parametrize("text", ["1e-5", "1.e-5", '"1e-5"', "'1e-5'", "0.00001", "1.0e-05", "1E-5", ".00001", "+1e-5"])
def test_every_spelling_of_a_number(write: Write, text: str) -> None:
    assert load_recipe(write(optimizer(f"lr: {text}"))).optimizer.lr == 1e-5


@pytest.mark.parametrize("text", ["1e-5x", "ten", "1e", "0x", "1,5", "true", "[1]", ".nan", ".inf", "1e999", ""])
def test_what_is_no_number_is_refused_with_its_key_and_line(write: Write, text: str) -> None:
    error = refusal(write(optimizer(f"lr: {text}")))
    assert error.where is not None
    assert error.where.endswith(":9")
    assert error.message.startswith("optimizer.lr: must be a")


@pytest.mark.parametrize("digits", [19, 30, 400, 5000])
def test_numbers_beyond_reason(write: Write, digits: int) -> None:
    keys = ("optimizer.lr", "train.steps", "train.seed", "memory.vram", "train.save_every", "memory.slots")
    for key in keys:
        for text in ("9" * digits, f"{'9' * digits}.5", f"'{'9' * digits} min'"):
            if (key, digits) in {("optimizer.lr", 19), ("optimizer.lr", 30)}:
                continue
            error = refusal(write(MINIMAL), overrides=[f"{key}={text}"])
            assert error.message.startswith(f"{key}: ")
            assert len(error.message) < 200


@pytest.mark.parametrize(("text", "steps"), [("1000", 1000), ("1e3", 1000), ("1_000", 1000), ("'12'", 12), ("010", 10)])
def test_whole_numbers(write: Write, text: str, steps: int) -> None:
    assert load_recipe(write(f"{MINIMAL}train: {{steps: {text}}}\n")).train.steps == steps


@pytest.mark.parametrize("text", ["1.5", "12:30", "true", "1e-3"])
def test_no_whole_numbers(write: Write, text: str) -> None:
    assert "train.steps: must be a whole number" in refusal(write(f"{MINIMAL}train: {{steps: {text}}}\n")).message


@pytest.mark.parametrize("word", ["no", "off", "yes", "on", "No", "OFF"])
def test_a_boolean_of_yaml_1_1_for_text_is_an_error_that_says_so(write: Write, word: str) -> None:
    error = refusal(write(MINIMAL.replace("max_seq_len: 8", f"system: {word}")))
    assert f'data.system: `{word}` is a boolean to YAML 1.1: write "{word}" in quotes' in error.message
    quoted = load_recipe(write(MINIMAL.replace("max_seq_len: 8", f"system: '{word}'")))
    assert quoted.data.system == word


def test_words_where_a_boolean_or_the_word_itself_is_meant(write: Write) -> None:
    recipe = load_recipe(write(f"{MINIMAL}memory: {{compile: off}}\nreport: {{tensorboard: yes}}\n"))
    assert recipe.memory.compile == "off"
    assert recipe.report.tensorboard is True


@pytest.mark.parametrize("value", ["5e3", "12", "true"])
def test_a_revision_that_looks_like_something_else_must_be_quoted(write: Write, value: str) -> None:
    text = MINIMAL.replace("model:", f"model:\n  revision: {value}")
    assert "quotes" in refusal(write(text)).message
    assert load_recipe(write(text.replace(value, f'"{value}"'))).model.revision == value


@pytest.mark.parametrize("value", ['"true"', "1", "maybe"])
def test_only_true_and_false_are_flags(write: Write, value: str) -> None:
    assert "output.overwrite: must be true or false" in refusal(write(f"{MINIMAL}  overwrite: {value}\n")).message


def test_ambiguous_words_in_config_overrides(write: Write) -> None:
    text = MINIMAL.replace("model:", "model:\n  config: {use_cache: no}")
    assert "write true, false, or" in refusal(write(text)).message


def test_duplicate_keys_name_both_lines(write: Write) -> None:
    error = refusal(write(MINIMAL + "train:\n  seed: 1\n  steps: 2\n  seed: 3\n"))
    assert "train.seed: the key stands twice, first in line 9" in error.message
    assert error.where is not None
    assert error.where.endswith(":11")


def test_a_duplicate_section(write: Write) -> None:
    assert "data: the key stands twice" in refusal(write(MINIMAL + "data:\n  train: b.jsonl\n")).message


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("model: [unclosed\n", "not valid YAML", ":2:1"),
        ("model:\n\tpath: x\n", "not valid YAML", ":2:1"),
        ("a: b: c\n", "not valid YAML: mapping values are not allowed here", ":1:5"),
        ("- a\n- b\n", "not a list", ":1:1"),
        ("just words\n", "not text", ":1:1"),
        ("", "the recipe is empty", ":1:1"),
        ("# only a comment\n", "the recipe is empty", ":1:1"),
        ("a: 1\n---\nb: 2\n", "not valid YAML", ":2:1"),
        ("a: *nowhere\n", "not valid YAML: found undefined alias", ":1:4"),
    ],
)
def test_what_is_not_a_recipe_is_one_line_with_its_place(write: Write, text: str, message: str, where: str) -> None:
    error = refusal(write(text))
    assert message in error.message
    assert "\n" not in error.message
    assert error.where is not None
    assert error.where.endswith(where)


def test_control_characters(write: Write) -> None:
    error = refusal(write(MINIMAL + "train:\n  seed: \x07\n"))
    assert "U+0007" in error.message
    assert str(error.where).endswith(":9")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("model: {path: café}\n".encode("latin-1"))
    assert refusal(str(path)).message == "is not UTF-8 text"


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_recipe(str(path)).model.path == "m"


def test_tags_are_refused(write: Write) -> None:
    error = refusal(write(MINIMAL.replace("path: m", "path: !!python/object/apply:os.getcwd []")))
    assert "tags are not supported" in error.message


def test_anchors_aliases_and_merge_keys(write: Write) -> None:
    recipe = load_recipe(
        write(
            "model: {path: m}\ndata:\n  train:\n    - &chat {path: a.jsonl, format: messages, limit: 5}\n"
            "    - {<<: *chat, path: b.jsonl}\n  eval: [*chat]\noutput: {dir: runs/x}\n"
        )
    )
    assert [(s.path, s.limit) for s in recipe.data.train] == [("a.jsonl", 5), ("b.jsonl", 5)]
    assert recipe.data.eval == recipe.data.train[:1]


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]\n",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 10)}]\n" for p, n in zip("abcdefg", "bcdefgh", strict=True)),
        "[" * 5000,
    ],
    ids=["loop", "billion laughs", "depth"],
)
def test_documents_that_explode(write: Write, text: str) -> None:
    assert "deeply" in refusal(write(text)).message or "YAML" in refusal(write(text)).message


def test_sections_with_everything_commented_out_are_defaults(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL + "train:\noptimizer:\n  # lr: 3\n"))
    assert recipe.train == Recipe.model_fields["train"].get_default(call_default_factory=True)


def test_a_section_that_is_no_mapping(write: Write) -> None:
    assert "train: must be a mapping of keys, not `5`" in refusal(write(MINIMAL + "train: 5\n")).message
    assert "train: must be a mapping of keys, not a list" in refusal(write(MINIMAL + "train: [1]\n")).message


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    assert "folder" in refusal(str(tmp_path)).message
    error = refusal("quikstart")
    assert error.hint == "did you mean the shipped recipe `quickstart`?"
    assert isinstance(error, RecipeError)
