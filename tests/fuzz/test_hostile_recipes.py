"""Recipes that nobody wrote in good faith: quick refusals by name, and nothing of the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzz.commands import ask, write_recipe
from fuzz.guard import bounded
from megatrain.errors import MegatrainError, RecipeError
from megatrain.recipe import load_recipe

MINIMAL = "model:\n  path: m\ndata:\n  train: a.jsonl\noutput:\n  dir: runs/x\n"

BOMBS = {
    "a line of 10 MB": (MINIMAL + "train: {seed: " + "a" * 10_000_000 + "}\n", "no recipe"),
    "2 MB of text": (MINIMAL + "x: " + "a" * 2_000_000, "too many for a recipe"),
    "a million keys": (MINIMAL + "".join(f"{i}: 1\n" for i in range(90_000)), "too large or nested too deeply"),
    "deep lists": ("x: " + "[" * 50_000, "too large or nested too deeply"),
    "deep keys": ("x:\n " + "? " * 200_000, "too large or nested too deeply"),
    "laughing aliases": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
        "too large or nested too deeply",
    ),
    "a mapping that merges itself": ("a: &a\n  <<: *a\n", "too large or nested too deeply"),
    "a tag that calls": (MINIMAL + "train: {seed: !!python/object/apply:os.system [id]}\n", "tags are not supported"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_soon(tmp_path: Path, bomb: str) -> None:
    text, message = BOMBS[bomb]
    (tmp_path / "r.yaml").write_text(text)
    with bounded(), pytest.raises(RecipeError, match=message):
        load_recipe(str(tmp_path / "r.yaml"))


def test_thousands_of_mistakes_are_told_in_part(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(MINIMAL + "".join(f"key{i}: 1\n" for i in range(3000)))
    with bounded(), pytest.raises(RecipeError, match="3000 problems") as caught:
        load_recipe(str(tmp_path / "r.yaml"))
    assert caught.value.message.endswith("and 2950 more")


def test_a_long_chain_of_bases(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    (tmp_path / "200.yaml").write_text(MINIMAL)
    with pytest.raises(RecipeError, match="a chain of more than 20 recipes"):
        load_recipe(str(tmp_path / "0.yaml"))
    assert load_recipe(str(tmp_path / "185.yaml")).model.path == "m"


@pytest.mark.parametrize("base", ["/dev/zero", "..", "pipe", "~nobodyhere/x", "nowhere.yaml"])
def test_a_base_that_is_no_file(tmp_path: Path, base: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "r.yaml").write_text(f"base: {base}\n")
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_a_recipe_of_a_terabyte(tmp_path: Path) -> None:
    with (tmp_path / "r.yaml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RecipeError, match=r"a file of 1\.0 TiB is no recipe"):
        load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("~nobodyhere/x", "no home folder of such a user"),
        ("a" * 300, "too long"),
        ("a/" * 3000, "too long"),
        ('"a\\0b"', "null character"),
        ('"\\ud800"', "half a surrogate pair"),
    ],
)
@pytest.mark.parametrize("key", ["model.path", "data.train", "output.dir", "tokenizer.path"])
def test_paths_that_no_file_has(tmp_path: Path, key: str, value: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(MINIMAL)
    with pytest.raises(RecipeError, match=message):
        load_recipe(str(tmp_path / "r.yaml"), overrides=[f"{key}={value}"])


def test_an_output_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(MINIMAL)
    with pytest.raises(RecipeError, match="is no UTF-8") as caught:
        load_recipe(str(tmp_path / "r.yaml"), output_dir=os.fsdecode(b"\xff"))
    str(caught.value).encode()


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "SECRET", "db_password", "GITHUB_TOKEN"],
)
@pytest.mark.parametrize("form", ["${%s}", "${%s:-default}"])
def test_credentials_are_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    monkeypatch.setenv(name, "hunter2")
    (tmp_path / "r.yaml").write_text(MINIMAL)
    with pytest.raises(RecipeError, match="names a credential") as caught:
        load_recipe(str(tmp_path / "r.yaml"), overrides=[f"data.system={form % name}"])
    assert name in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["MODEL_DIR", "EOS_TOKEN", "MAX_TOKENS", "KEYBOARD", "MONKEY", "HOME2"])
def test_other_variables_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "value")
    (tmp_path / "r.yaml").write_text(MINIMAL)
    assert load_recipe(str(tmp_path / "r.yaml"), overrides=[f"data.system=${{{name}}}"]).data.system == "value"


def test_values_that_no_json_can_hold(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(MINIMAL)
    for value in ("{a: 1e999}", "{a: [.nan]}"):
        with pytest.raises(MegatrainError, match="must hold finite numbers"):
            load_recipe(str(tmp_path / "r.yaml"), overrides=[f"model.config={value}"])


def test_a_billion_epochs_are_counted_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, train={"path": "megatrain:devil.jsonl", "limit": 4})
    with bounded():
        once = ask(capsys, "finetune", recipe, "--dry-run", "--set", "train.epochs=1")
        many = ask(capsys, "finetune", recipe, "--dry-run", "--set", "train.epochs=1000000000")
    assert many.result["steps"] == 10**9 * once.result["steps"]


def test_a_billion_epochs_that_differ_need_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, train={"path": "megatrain:devil.jsonl", "limit": 4, "weight": 1.5})
    answer = ask(capsys, "finetune", recipe, "--dry-run", "--set", "train.epochs=1000000000")
    assert (answer.code, "cannot be counted" in answer.message) == (2, True)
    few = ask(capsys, "finetune", recipe, "--dry-run", "--set", "train.epochs=1000000000", "--set", "train.steps=7")
    assert few.result["steps"] == 7
