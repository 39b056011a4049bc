"""Where values come from: bases, the environment, ``--set``, ``--output-dir``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_files import MINIMAL, refusal

from megatrain.recipe import load_recipe

Write = Callable[..., str]


def test_base_is_inherited_and_overridden(write: Write) -> None:
    write(MINIMAL + "optimizer: {lr: 1e-3, betas: [0.5, 0.6]}\ntrain: {seed: 7}\n", name="lower.yaml")
    write("base: lower.yaml\noptimizer: {lr: 2e-3}\ntrain:\n", name="middle.yaml")
    recipe = load_recipe(write("base: middle.yaml\nmodel: {init: random}\ndata: {train: [b, c]}\n"))
    assert recipe.model.path == "m"
    assert recipe.model.init == "random"
    assert recipe.optimizer.lr == 2e-3
    assert recipe.optimizer.betas == (0.5, 0.6)
    assert recipe.train.seed == 7
    assert [source.path for source in recipe.data.train] == ["b", "c"]
    assert recipe.data.max_seq_len == 8


def test_null_overrides_what_is_inherited(write: Write) -> None:
    write(MINIMAL + "train: {steps: 5, epochs: 2}\n", name="lower.yaml")
    assert load_recipe(write("base: lower.yaml\ntrain: {steps: null}\n")).train.steps is None


def test_base_counts_from_its_recipe(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    write(MINIMAL, name="lower.yaml")
    path = write("base: ../lower.yaml\n", name="inner/upper.yaml")
    monkeypatch.chdir("/")
    assert load_recipe(path).model.path == "m"


def test_base_may_be_a_shipped_recipe(write: Write) -> None:
    assert load_recipe(write("base: quickstart\n")) == load_recipe("quickstart")


def test_bases_in_a_circle(write: Write) -> None:
    write("base: b.yaml\n", name="a.yaml")
    path = write("base: c.yaml\n", name="b.yaml")
    write("\nbase: a.yaml\n", name="c.yaml")
    error = refusal(path)
    assert "circle: b.yaml -> c.yaml -> a.yaml -> b.yaml" in error.message
    assert str(error.where).endswith("a.yaml:1")
    assert "circle" in refusal(write("base: self.yaml\n", name="self.yaml")).message


def test_a_missing_base_names_the_line_that_asks_for_it(write: Write) -> None:
    error = refusal(write("\n\nbase: nowhere.yaml\n"))
    assert "there is no recipe `nowhere.yaml`" in error.message
    assert str(error.where).endswith(":3")
    assert "base: must be the path" in refusal(write(MINIMAL + "base: [a]\n")).message


def test_a_mistake_in_a_base_names_the_base(write: Write) -> None:
    lower = write(MINIMAL + "train: {sed: 7}\n", name="lower.yaml")
    error = refusal(write("base: lower.yaml\n"))
    assert error.where == f"{lower}:8"


def test_an_override_repairs_a_value_of_the_base_but_not_an_unknown_key(write: Write) -> None:
    write(MINIMAL + "train: {seed: x}\n", name="lower.yaml")
    assert load_recipe(write("base: lower.yaml\n"), overrides=["train.seed=3"]).train.seed == 3


def test_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LR": "2e-5", "ROOT": "/data", "FLAG": "true", "EMPTY": "", "STEPS": "12"}.items():
        monkeypatch.setenv(name, value)
    recipe = load_recipe(
        write(
            "model: {path: '${ROOT}/model'}\n"
            "data: {train: ['${ROOT}/a.jsonl', '${OTHER:-b}.jsonl'], system: '$${LR} is not expanded'}\n"
            "train:\n  steps: ${STEPS}\n  epochs: ${EMPTY:-null}\n  deterministic: ${FLAG}\n"
            "optimizer:\n  lr: ${LR}\n  warmup: ${EMPTY:-0.5}\n"
            "output: {dir: 'runs/${STEPS}-${LR}'}\n"
        )
    )
    assert recipe.model.path == "/data/model"
    assert [source.path for source in recipe.data.train] == ["/data/a.jsonl", "b.jsonl"]
    assert recipe.data.system == "${LR} is not expanded"
    assert (recipe.train.steps, recipe.train.epochs, recipe.train.deterministic) == (12, None, True)
    assert (recipe.optimizer.lr, recipe.optimizer.warmup) == (2e-5, 0.5)
    assert recipe.output.dir == "runs/12-2e-5"


def test_a_digit_string_from_the_environment_is_text_where_text_is_meant(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REVISION", "123456")
    recipe = load_recipe(write(MINIMAL.replace("model:", "model:\n  revision: ${REVISION}")))
    assert recipe.model.revision == "123456"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${MEGATRAIN_UNSET}", "the environment variable MEGATRAIN_UNSET is not set"),
        ("${1X}", "`${1X}` is not a variable"),
        ("${}", "is not a variable"),
        ("'${LR'", "is not a variable"),
    ],
)
def test_variables_that_cannot_be_expanded(write: Write, text: str, message: str) -> None:
    error = refusal(write(MINIMAL.replace("path: m", f"path: {text}")))
    assert message in error.message
    assert str(error.where).endswith(":2")


def test_an_unset_variable_does_not_matter_where_it_is_overridden(write: Write) -> None:
    lower = write(MINIMAL.replace("runs/x", "${MEGATRAIN_UNSET}"), name="lower.yaml")
    assert load_recipe(lower, output_dir="runs/y").output.dir == "runs/y"
    assert load_recipe(lower, overrides=["output.dir=runs/z"]).output.dir == "runs/z"
    assert load_recipe(write("base: lower.yaml\noutput: {dir: runs/w}\n")).output.dir == "runs/w"
    assert "MEGATRAIN_UNSET" in refusal(lower, overrides=["output.keep=3"]).message


def test_nothing_of_the_environment_leaks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_SECRET", "hunter2")
    monkeypatch.setenv("INDIRECT", "${MEGATRAIN_SECRET}")
    for value in ("${MEGATRAIN_SECRE}", "${MEGATRAIN_SECRET}", "${INDIRECT}"):
        for key in ("optimizer.lr", "train.steps", "memory.vram", "memory.slots", "train.save_every", "optimizer.name"):
            error = refusal(write(MINIMAL), overrides=[f"{key}={value}"])
            assert "hunter2" not in str(error)
            assert value in str(error) or "MEGATRAIN_SECRE is not set" in str(error)
    shown = load_recipe(write(MINIMAL), overrides=["data.system=${INDIRECT}"]).to_yaml()
    assert "hunter2" not in shown


def test_overrides(write: Write) -> None:
    recipe = load_recipe(
        write(MINIMAL),
        overrides=[
            "optimizer.lr=2e-5",
            "optimizer.lr=3e-5",
            "data.train=[a.jsonl,b.jsonl]",
            "data.train.1.limit=5",
            "data.eval_fraction=0",
            "model.config={rope_scaling: {factor: 2.0}}",
            "model.config.rope_theta=1e4",
            "train.save_every=30 min",
            "report.wandb=",
            "tokenizer.chat_template=a=b",
        ],
        output_dir="runs/no",
    )
    assert recipe.optimizer.lr == 3e-5
    assert [(source.path, source.limit) for source in recipe.data.train] == [("a.jsonl", None), ("b.jsonl", 5)]
    assert recipe.data.eval_fraction == 0
    assert recipe.model.config == {"rope_scaling": {"factor": 2.0}, "rope_theta": 10000.0}
    assert str(recipe.train.save_every) == "30 min"
    assert recipe.tokenizer.chat_template == "a=b"
    assert recipe.output.dir == "runs/no"


def test_keys_of_one_source(write: Write) -> None:
    recipe = load_recipe(write(MINIMAL), overrides=["data.train.0.limit=5", "data.train.0.format=text"])
    assert [(s.path, s.limit, s.format) for s in recipe.data.train] == [("a.jsonl", 5, "text")]
    error = refusal(write(MINIMAL), overrides=["data.train.1.limit=5"])
    assert error.message == "data.train.1.limit: the list has no such item; the first one is 0"


def test_an_unquoted_variable_in_a_flow_mapping(write: Write) -> None:
    assert (
        refusal(write(MINIMAL + "train: {seed: ${SEED}}\n")).hint == "inside { } and [ ] a ${VARIABLE} must be quoted"
    )


@pytest.mark.parametrize("text", ["optimizer.lr", "=3", "", "  =3"])
def test_an_override_without_key_or_value(write: Write, text: str) -> None:
    error = refusal(write(MINIMAL), overrides=[text])
    assert "is not KEY=VALUE" in error.message
    assert error.where == "--set"


def test_mistakes_in_overrides_name_the_option(write: Write) -> None:
    error = refusal(write(MINIMAL), overrides=["optimizer.lr=x"])
    assert error.where == "--set optimizer.lr"
    assert refusal(write(MINIMAL), overrides=["optimizer.lrr=3"]).hint == "did you mean `optimizer.lr`?"
    assert refusal(write(MINIMAL), overrides=["optimizer.lr.x=3"]).message.startswith("optimizer.lr: must be a number")
    assert "not valid YAML" in refusal(write(MINIMAL), overrides=["optimizer.lr=[1"]).message
    assert "only be named in a file" in refusal(write(MINIMAL), overrides=["base=quickstart"]).message
    assert "the key stands twice" in refusal(write(MINIMAL), overrides=["model={path: a, path: b}"]).message


def test_home_folders(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    recipe = load_recipe(write(MINIMAL), overrides=["model.path=~/m", "data.train=~/a.jsonl"], output_dir="~/runs/x")
    assert recipe.model.path == "/home/somebody/m"
    assert recipe.data.train[0].path == "/home/somebody/a.jsonl"
    assert recipe.output.dir == "/home/somebody/runs/x"
