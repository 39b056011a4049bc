"""The schema as a whole: documented, complete, frozen, and the same in every form it is written in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recipe_files import MINIMAL, refusal

from megatrain.recipe import Recipe, Source, diff_for_resume, load_recipe, recipe_from_dict, shipped_recipes
from megatrain.recipe.suggest import sections
from megatrain.recipe.template import json_schema, template
from megatrain.recipe.validate import validate
from megatrain.recipe.yaml_text import parse

Write = Callable[..., str]

# For every key a value other than its default. None: no other value is accepted yet (test_problems shows the refusal).
OTHER: dict[str, Any] = {
    "model.path": "other",
    "model.revision": "v2",
    "model.init": "random",
    "model.attention": "eager",
    "model.trust_remote_code": True,
    "model.config": {"rope_theta": 1e6},
    "tokenizer.path": "tok",
    "tokenizer.chat_template": "{{ messages }}",
    "data.train": ["b.jsonl"],
    "data.eval": "c.jsonl",
    "data.eval_fraction": 0.1,
    "data.max_seq_len": 64,
    "data.packing": False,
    "data.train_on": "all",
    "data.system": "Be brief.",
    "data.long_rows": "skip",
    "data.bad_rows": "skip",
    "data.shuffle": False,
    "data.streaming": None,
    "train.epochs": 3,
    "train.steps": 7,
    "train.batch_size": 8,
    "train.precision": "fp32",
    "train.max_grad_norm": None,
    "train.nonfinite": "skip",
    "train.deterministic": True,
    "train.freeze": None,
    "train.seed": 1,
    "train.eval_every": "2 epochs",
    "train.save_every": "30 min",
    "train.log_every": 5,
    "optimizer.name": None,
    "optimizer.lr": 2e-5,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.1,
    "optimizer.decay_all": True,
    "optimizer.momentum": None,
    "optimizer.master": None,
    "optimizer.state": None,
    "optimizer.schedule": "wsd",
    "optimizer.warmup": 10,
    "optimizer.min_lr_ratio": 0.1,
    "memory.device": "cuda:1",
    "memory.vram": "24GiB",
    "memory.host": "100 GB",
    "memory.micro_batch": 2,
    "memory.slots": 3,
    "memory.activations": "host",
    "memory.compile": "off",
    "memory.threads": 4,
    "output.dir": "runs/y",
    "output.overwrite": True,
    "output.keep": 3,
    "output.export": False,
    "output.export_dtype": "fp32",
    "report.tensorboard": True,
    "report.wandb": "project",
}
NULL_MEANS_OFF = {"train.max_grad_norm"}
FREE_ON_RESUME = {"train.epochs", "train.steps", "train.eval_every", "train.save_every", "train.log_every"}


def all_fields() -> dict[str, pydantic.fields.FieldInfo]:
    return {f"{name}.{key}": field for name, model in sections().items() for key, field in model.model_fields.items()}


def set_key(values: dict[str, Any], *, key: str, value: Any) -> dict[str, Any]:
    section, name = key.split(".")
    return {**values, section: {**values.get(section, {}), name: value}}


def minimal() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(MINIMAL)
    return values


def test_the_table_above_has_every_key() -> None:
    assert list(OTHER) == list(all_fields())


def test_every_key_is_documented() -> None:
    fields = {**all_fields(), **{f"source.{key}": field for key, field in Source.model_fields.items()}}
    for key, field in {**fields, **dict(Recipe.model_fields)}.items():
        assert field.description, key
        assert len(field.description) > 10, key
        assert not field.description.endswith("."), key


@pytest.mark.parametrize("key", [key for key, value in OTHER.items() if value is not None or key in NULL_MEANS_OFF])
def test_every_key_changes_the_recipe_and_survives_its_own_yaml(key: str, write: Write) -> None:
    values = minimal()
    if key == "train.eval_every":
        values = set_key(values, key="data.eval", value="c.jsonl")
    before, after = recipe_from_dict(values), recipe_from_dict(set_key(values, key=key, value=OTHER[key]))
    assert after != before
    section, name = key.split(".")
    assert getattr(getattr(after, section), name) != getattr(getattr(before, section), name)
    assert load_recipe(write(after.to_yaml())) == after
    assert recipe_from_dict(after.to_dict()) == after
    json.dumps(after.to_dict(), allow_nan=False)
    may_change = section in {"output", "report", "memory"} or key in FREE_ON_RESUME
    changed = diff_for_resume(before, after)
    assert (changed == []) == may_change
    assert all(entry.startswith(key) for entry in changed)


def test_only_three_keys_are_required() -> None:
    required = [key for key, field in all_fields().items() if field.is_required()]
    assert required == ["model.path", "data.train", "output.dir"]


def test_a_recipe_is_frozen() -> None:
    recipe = recipe_from_dict(minimal())
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.train.seed = 1  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.train = recipe.train  # type: ignore[misc]


def test_the_types_that_other_rooms_read(write: Write) -> None:
    recipe = load_recipe(
        write(MINIMAL + "memory: {vram: 24 GB, micro_batch: 2}\ntrain: {save_every: 1 epoch, max_grad_norm: null}\n")
    )
    assert recipe.data.train == (Source(path="a.jsonl"),)
    assert recipe.data.eval is None
    assert recipe.memory.vram == 24 * 10**9
    assert recipe.memory.host == "auto"
    assert recipe.memory.micro_batch == 2
    assert recipe.train.save_every is not None
    assert (recipe.train.save_every.value, recipe.train.save_every.unit) == (1, "epochs")
    assert recipe.train.max_grad_norm is None
    assert type(recipe.optimizer.warmup) is float
    assert type(recipe.train.batch_size) is int


@given(
    st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda text: text.strip())
    | st.sampled_from(
        ["no", "1e-5", "null", "~x", "${HOME}", "$${X}", "a: b", "# x", "- x", " x ", "a\nb\n", "2024-01-01"]
    )
)
def test_any_text_survives_its_own_yaml(text: str) -> None:
    recipe = recipe_from_dict(set_key(minimal(), key="data.system", value=text))
    root, problems = parse(recipe.to_yaml(), source="own", environment={})
    assert validate(root, problems=problems, source="own") == recipe


def test_floats_are_numbers_to_every_yaml_reader() -> None:
    values = set_key(minimal(), key="optimizer.lr", value=1e-5)
    values = set_key(values, key="model.config", value={"rope_theta": 1e22, "eps": 1e-12})
    recipe = recipe_from_dict(values)
    read = yaml.safe_load(recipe.to_yaml())  # PyYAML follows YAML 1.1, where 1e-05 is text
    assert read["optimizer"]["lr"] == 1e-5
    assert read["optimizer"]["eps"] == 1e-8
    assert read["model"]["config"]["eps"] == 1e-12


def test_the_template_is_a_recipe_with_every_key_and_its_default(write: Write) -> None:
    recipe = load_recipe(write(template()))
    values = yaml.safe_load(template())
    assert {f"{section}.{key}" for section, body in values.items() for key in body} == set(all_fields())
    assert recipe == recipe_from_dict(
        {"model": {"path": recipe.model.path}, "data": {"train": "data/train.jsonl"}, "output": {"dir": "runs/first"}}
    )
    for key in Source.model_fields:
        assert f"    {key}: " in template() or f"- {key}: " in template()


def test_json_schema_documents_every_key() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"base", *sections()}
    for name, model in sections().items():
        definition = schema["$defs"][model.__name__]
        assert set(definition["properties"]) == set(model.model_fields), name
        assert definition["additionalProperties"] is False
        for key, entry in definition["properties"].items():
            assert entry["description"], f"{name}.{key}"
            assert "$ref" in entry or {"type", "anyOf", "enum", "const"} & set(entry), f"{name}.{key}"
    assert schema["$defs"]["Optimizer"]["properties"]["schedule"]["enum"] == ["constant", "linear", "cosine", "wsd"]


def test_resume_names_what_changed_in_nested_values() -> None:
    before = recipe_from_dict({**minimal(), "data": {"train": ["a", "b"]}})
    after = recipe_from_dict({**minimal(), "data": {"train": ["a", {"path": "b", "limit": 3}]}})
    assert diff_for_resume(before, after) == ["data.train.1.limit"]
    more = recipe_from_dict({**minimal(), "model": {"path": "m", "config": {"rope_scaling": {"factor": 2}}}})
    assert diff_for_resume(recipe_from_dict(minimal()), more) == ["model.config.rope_scaling.factor"]


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe(name: str, write: Write) -> None:
    recipe = load_recipe(name)
    assert load_recipe(str(shipped_recipes()[name])) == recipe
    assert load_recipe(write(recipe.to_yaml())) == recipe
    assert recipe.output.dir == f"runs/{name}"
    first = shipped_recipes()[name].read_text().partition("\n")[0]
    assert first.startswith("# ")
    assert len(first) < 100


def test_the_shipped_recipes_by_name() -> None:
    assert set(shipped_recipes()) == {
        "continued-pretraining",
        "llama3-70b",
        "llama3-8b",
        "pretrain-from-scratch",
        "quickstart",
        "qwen2.5-32b",
        "qwen2.5-7b",
        "qwen3-14b",
        "smollm2-135m",
    }
    assert load_recipe("quickstart").data.train[0].path == "megatrain:devil.jsonl"
    assert load_recipe("pretrain-from-scratch").model.init == "random"


def test_a_file_is_taken_before_a_shipped_recipe_of_its_name(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(MINIMAL, name="quickstart")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart").model.path == "m"
    assert "shipped recipe `llama3-8b`" in str(refusal("llama3-8b.yaml").hint)
