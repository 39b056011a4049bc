"""Every key of the recipe does something: another value ends in other numbers, another plan, or a refusal.

The table is held against the schema, so a key that nothing reads cannot be added unseen.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from whole import curve, session, weights, write_rows

from megatrain.errors import MegatrainError
from megatrain.model.streamed import StreamedModel
from megatrain.plan.hardware import DeviceMemory
from megatrain.recipe import Recipe, Source, recipe_from_dict, resolve_asset
from megatrain.recipe.suggest import sections
from megatrain.report.metrics import read_metrics
from megatrain.stream.device import CpuDevice
from megatrain.train import planning
from megatrain.train.model_config import read_config

Values = dict[str, Any]  # dotted keys
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"


@dataclass(frozen=True)
class Key:
    """`value` against what is there without it, both `given` other keys. `look` says what must differ."""

    value: Any
    look: str
    given: Values = field(default_factory=dict)


KEYS: dict[str, Key] = {
    "model.path": Key("$other_model", "losses"),
    "model.revision": Key("v2", "config call"),
    "model.init": Key("random", "losses"),
    "model.attention": Key("eager", "attention"),
    "model.trust_remote_code": Key(True, "config call"),
    "model.config": Key({"rms_norm_eps": 0.1}, "losses"),
    "tokenizer.path": Key("$other_tokenizer", "losses"),
    "tokenizer.chat_template": Key(TEMPLATE, "losses"),
    "data.train": Key("$other_rows", "losses"),
    "data.eval": Key("$other_rows", "evaluations"),
    "data.eval_fraction": Key(0.2, "evaluations"),
    "data.max_seq_len": Key(128, "losses"),
    "data.packing": Key(False, "losses"),
    "data.train_on": Key("all", "losses"),
    "data.system": Key("Be brief.", "losses"),
    "data.long_rows": Key("error", "ending", {"data.max_seq_len": 32}),
    "data.bad_rows": Key("skip", "ending", {"data.train": "$bad_rows"}),
    "data.shuffle": Key(False, "losses"),
    "data.streaming": Key(True, "refusal"),
    "source.path": Key("$other_rows", "losses"),
    "source.format": Key("text", "ending"),
    "source.split": Key("test", "ending"),
    "source.subset": Key("main", "ending"),
    "source.columns": Key({"messages": "talk"}, "ending", {"source.path": "$renamed_rows"}),
    "source.limit": Key(5, "losses"),
    "source.weight": Key(2.0, "steps", {"train.steps": None}),
    "train.epochs": Key(2, "steps", {"train.steps": None}),
    "train.steps": Key(2, "steps"),
    "train.batch_size": Key(2, "losses"),
    "train.precision": Key("bf16", "losses"),
    "train.max_grad_norm": Key(None, "losses"),
    "train.nonfinite": Key("skip", "ending", {"optimizer.lr": 1e30, "optimizer.warmup": 0}),
    "train.deterministic": Key(True, "kernels"),
    "train.freeze": Key(["embed"], "refusal"),
    "train.seed": Key(1, "losses"),
    "train.eval_every": Key(1, "evaluations", {"data.eval_fraction": 0.2}),
    "train.save_every": Key(1, "saves"),
    "train.log_every": Key(3, "lines"),
    "optimizer.name": Key("muon", "refusal"),
    "optimizer.lr": Key(2e-3, "losses"),
    "optimizer.betas": Key([0.5, 0.6], "losses"),
    "optimizer.eps": Key(1e-3, "losses"),
    "optimizer.weight_decay": Key(0.5, "losses"),
    "optimizer.decay_all": Key(True, "losses", {"optimizer.weight_decay": 0.5}),
    "optimizer.momentum": Key(0.5, "refusal"),
    "optimizer.master": Key("bf16", "refusal"),
    "optimizer.state": Key("bf16", "losses"),
    "optimizer.schedule": Key("wsd", "losses"),
    "optimizer.warmup": Key(2, "losses"),
    "optimizer.min_lr_ratio": Key(0.5, "losses"),
    "memory.device": Key("cuda:99", "ending"),
    "memory.vram": Key("1MiB", "ending"),
    "memory.host": Key("1MiB", "ending"),
    "memory.micro_batch": Key(1, "plan"),
    "memory.slots": Key(3, "plan"),
    "memory.activations": Key("host", "plan"),
    "memory.compile": Key("off", "compiled"),
    "memory.threads": Key(1, "plan"),
    "output.dir": Key("$elsewhere", "folder"),
    "output.overwrite": Key(True, "second run"),
    "output.keep": Key(1, "checkpoints", {"train.save_every": 1}),
    "output.export": Key(False, "model"),
    "output.export_dtype": Key("fp32", "model"),
    "report.tensorboard": Key(True, "packages"),
    "report.wandb": Key("project", "packages"),
}
SAME_NUMBERS = ("memory.slots", "memory.activations", "memory.threads")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the values that begin with a dollar stand for."""
    folder = tmp_path_factory.mktemp("places")
    rows = write_rows(folder / "rows.jsonl")
    (folder / "renamed.jsonl").write_text(rows.read_text().replace('"messages"', '"talk"'))
    (folder / "bad.jsonl").write_text(rows.read_text() + '{"messages": null}\n')
    other = write_rows(folder / "other.jsonl", words=("one", "two", "three", "four", "five", "six", "seven", "eight"))
    for name in ("model", "tokenizer"):
        shutil.copytree(resolve_asset("megatrain:kjv-tiny"), folder / name)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    settings = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return {
        "$rows": str(rows),
        "$bad_rows": str(folder / "bad.jsonl"),
        "$renamed_rows": str(folder / "renamed.jsonl"),
        "$other_rows": str(other),
        "$other_model": str(folder / "model"),
        "$other_tokenizer": str(folder / "tokenizer"),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, places: dict[str, str]) -> Callable[[Key], object]:
    """What is seen without a key's value; looked at once for all keys that share it."""
    seen: dict[str, object] = {}

    def look(key: Key) -> object:
        name = f"{key.look} {key.given}"
        if name not in seen:
            seen[name] = LOOKS[key.look](recipe_of(tmp_path_factory.mktemp("plain"), values=key.given, places=places))
        return seen[name]

    return look


def recipe_of(folder: Path, *, values: Values, places: dict[str, str]) -> Recipe:
    """Three steps on the shipped model. `source.*` are keys of the one source."""
    source = {"path": "$rows"} | {k.removeprefix("source."): v for k, v in values.items() if k.startswith("source.")}
    tree: dict[str, Any] = {
        "model": {"path": "megatrain:kjv-tiny"},
        "data": {"train": [source], "max_seq_len": 64},
        "train": {"batch_size": 4, "steps": 3},
        "optimizer": {"lr": 1e-3},
        "memory": {"device": "cpu", "micro_batch": 2, "threads": 2},
        "output": {"dir": str(folder / "run")},
    }
    for key, value in values.items():
        section, _, name = key.partition(".")
        if section != "source":
            tree.setdefault(section, {})[name] = value
    text = json.dumps(tree)
    for name, place in {**places, "$elsewhere": str(folder / "elsewhere")}.items():
        text = text.replace(json.dumps(name), json.dumps(place))
    return recipe_from_dict(json.loads(text))


def _run(recipe: Recipe) -> Path:
    session(recipe).run()
    return Path(recipe.output.dir)


def _ending(recipe: Recipe) -> str:
    try:
        return session(recipe).run().status
    except MegatrainError as error:
        return f"{error.kind}: {error.message}"


def _dry(recipe: Recipe) -> dict[str, Any]:
    try:
        return session(recipe).dry_run()
    except MegatrainError as error:
        return {"error": f"{error.where}: {error.message}"}


def _attention(recipe: Recipe) -> str:
    working = session(recipe)
    working.run()
    assert working._run is not None
    return working._run.model.attention


def _model(recipe: Recipe) -> bytes | None:
    folder = _run(recipe)
    return weights(folder) if (folder / "model").exists() else None


def _second_run(recipe: Recipe) -> str:
    _run(recipe)
    return _ending(recipe)


def _config_call(recipe: Recipe) -> object:
    """What transformers is asked for."""
    asked: dict[str, Any] = {}

    def from_pretrained(path: str, **options: Any) -> None:
        asked.update(options)
        raise OSError("not here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.model.skeleton.AutoConfig.from_pretrained", from_pretrained)
        _dry(recipe)
    return asked


def _packages(recipe: Recipe) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        return _dry(recipe)


def _kernels(recipe: Recipe) -> bool:
    """Whether deterministic kernels are on before a CUDA device is opened."""
    wanted = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"device": "cuda"})})
    before = torch.are_deterministic_algorithms_enabled()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            patch.setattr(planning, "open_cuda", _stop)
            with pytest.raises(_Stopped):
                planning.plan_run(wanted, config=read_config(wanted))
            return torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(before)


def _compiled(recipe: Recipe) -> bool:
    """What the model is told where there is an accelerator."""
    seen = []

    def note(spec: Any, *, rng: Any) -> None:
        seen.append(spec.compile)
        raise _Stopped

    card = DeviceMemory(total_bytes=1 << 35, free_bytes=1 << 35, name="a card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_open_device", lambda recipe: (CpuDevice(), "a card", card))
        patch.setattr(StreamedModel, "build", note)
        with pytest.raises(_Stopped):
            planning.plan_run(recipe, config=read_config(recipe))
    return bool(seen[0])


class _Stopped(Exception):
    pass


def _stop(*args: object) -> None:
    raise _Stopped


LOOKS: dict[str, Callable[[Recipe], object]] = {
    "losses": lambda recipe: (curve(_run(recipe), "loss"), weights(Path(recipe.output.dir))),
    "steps": lambda recipe: _dry(recipe)["steps"],
    "evaluations": lambda recipe: curve(_run(recipe), "step", "loss", kind="eval"),
    "saves": lambda recipe: curve(_run(recipe), "step", kind="save"),
    "lines": lambda recipe: curve(_run(recipe), "step"),
    "checkpoints": lambda recipe: sorted(path.name for path in (_run(recipe) / "checkpoints").iterdir()),
    "plan": lambda recipe: {k: v for k, v in _dry(recipe)["plan"].items() if k not in ("host", "device")},
    "folder": lambda recipe: str(_run(recipe)) * bool(read_metrics(Path(recipe.output.dir) / "metrics.jsonl")),
    "attention": _attention,
    "model": _model,
    "ending": _ending,
    "second run": _second_run,
    "config call": _config_call,
    "packages": _packages,
    "kernels": _kernels,
    "compiled": _compiled,
}


def test_the_table_has_every_key() -> None:
    every = [f"{name}.{key}" for name, section in sections().items() for key in section.model_fields]
    every += [f"source.{key}" for key in Source.model_fields]
    assert sorted(KEYS) == sorted(every)


@pytest.mark.parametrize("name", KEYS)
def test_another_value_is_seen_in_what_happens(
    name: str, tmp_path: Path, places: dict[str, str], plain: Callable[[Key], object]
) -> None:
    key = KEYS[name]
    if key.look == "refusal":
        with pytest.raises(MegatrainError) as caught:
            recipe_of(tmp_path, values={name: key.value}, places=places)
        assert caught.value.exit_code == 2
        assert name in str(caught.value)
        return
    other = LOOKS[key.look](recipe_of(tmp_path, values=key.given | {name: key.value}, places=places))
    assert other != plain(key)


def test_memory_options_move_no_bit(tmp_path: Path, places: dict[str, str]) -> None:
    looks = [
        LOOKS["losses"](recipe_of(tmp_path / name, values={name: KEYS[name].value} if name else {}, places=places))
        for name in ("", *SAME_NUMBERS)
    ]
    assert all(look == looks[0] for look in looks)
