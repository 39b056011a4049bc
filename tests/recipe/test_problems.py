"""Every mistake is told, all of them at once, each with its place and what was probably meant."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from recipe_files import MINIMAL, refusal

from megatrain.errors import NotAvailable, RecipeError
from megatrain.recipe import recipe_from_dict
from megatrain.recipe.suggest import sections

Write = Callable[..., str]

ALL_AT_ONCE = """\
model:
  path: megatrain:kjv-tin
  atention: sdpa
data:
  train:
    - a.jsonl
    - path: b.jsonl
      wieght: 2
      limit: 0
  eval_fraction: 1.5
  lr: 3
train:
  batch-size: 3
  steps: 5
  steps: 6
  max_grad_norm: 0
  save_every: 3 fortnights
optimiser: {lr: 3}
optimizer:
  lr: 1e-5x
  schedule: cosin
  warmup: 10
  name: muon
learning_rate: 3
output:
  dir: ${MEGATRAIN_TEST_UNSET}
"""

EXPECTED = [
    (2, "model.path: `megatrain:kjv-tin` is not shipped", "did you mean `megatrain:kjv-tiny`?"),
    (3, "model.atention: there is no such key", "did you mean `model.attention`?"),
    (8, "data.train.1.wieght: there is no such key", "did you mean `data.train.1.weight`?"),
    (9, "data.train.1.limit: must be at least 1, not `0`", None),
    (10, "data.eval_fraction: must be less than 1, not `1.5`", None),
    (11, "data.lr: there is no such key", "did you mean `optimizer.lr`?"),
    (13, "train.batch-size: there is no such key", "did you mean `train.batch_size`?"),
    (15, "train.steps: the key stands twice, first in line 14", None),
    (16, "train.max_grad_norm: must be more than 0, not `0`; null turns clipping off", None),
    (17, "train.save_every: `3 fortnights`: unknown unit `fortnights`", None),
    (18, "optimiser: there is no such section", "did you mean `optimizer`?"),
    (20, "optimizer.lr: must be a number, not `1e-5x`", None),
    (21, "optimizer.schedule: must be constant, linear, cosine or wsd, not `cosin`", "did you mean `cosine`?"),
    (23, "optimizer.name: `muon` is not available yet", None),
    (24, "learning_rate: there is no such key", "did you mean `optimizer.lr`?"),
    (26, "output.dir: the environment variable MEGATRAIN_TEST_UNSET is not set", None),
]


def test_all_mistakes_at_once_in_the_order_of_the_file(write: Write) -> None:
    path = write(ALL_AT_ONCE)
    error = refusal(path)
    assert type(error) is RecipeError
    assert error.exit_code == 2
    head, *lines = error.message.split("\n")
    assert head == f"{len(EXPECTED)} problems"
    for line, text, hint in EXPECTED:
        assert lines.pop(0).startswith(f"  {path}:{line}: {text}")
        if hint is not None:
            assert lines.pop(0) == f"    {hint}"
    assert lines == []


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("train", "lr", "optimizer.lr"),
        ("optimizer", "batch_size", "train.batch_size"),
        ("model", "max_seq_len", "data.max_seq_len"),
        ("train", "batch-size", "train.batch_size"),
        ("train", "batchSize", "train.batch_size"),
        ("train", "Batch_Size", "train.batch_size"),
        ("memory", "micro-batch", "memory.micro_batch"),
        ("train", "eval-every", "train.eval_every"),
        ("optimizer", "learning_rate", "optimizer.lr"),
        ("optimizer", "warmup_ratio", "optimizer.warmup"),
        ("train", "num_train_epochs", "train.epochs"),
        ("train", "output_dir", "output.dir"),
        ("data", "sequence_len", "data.max_seq_len"),
        ("data", "max_seq_length", "data.max_seq_len"),
        ("output", "overwite", "output.overwrite"),
        ("optimizer", "shedule", "optimizer.schedule"),
        ("memory", "precison", "train.precision"),
    ],
)
def test_did_you_mean(write: Write, section: str, key: str, meant: str) -> None:
    values = {"model": "  path: m\n", "data": "  train: a.jsonl\n", "output": "  dir: runs/x\n"}
    values[section] = values.get(section, "") + f"  {key}: 3\n"
    error = refusal(write("".join(f"{name}:\n{body}" for name, body in values.items())))
    assert error.message == f"{section}.{key}: there is no such key"
    assert error.hint == f"did you mean `{meant}`?"


@pytest.mark.parametrize(
    ("key", "meant"), [("lr", "optimizer.lr"), ("dataset", "data.train"), ("Model", "model"), ("bases", "base")]
)
def test_did_you_mean_at_the_top(write: Write, key: str, meant: str) -> None:
    assert refusal(write(f"{MINIMAL}{key}: 3\n")).hint == f"did you mean `{meant}`?"


def test_what_other_programs_need_and_this_one_does_not(write: Write) -> None:
    assert "no accumulation" in str(refusal(write(MINIMAL + "train: {gradient_accumulation_steps: 4}\n")).hint)
    assert "no adapters" in str(refusal(write(MINIMAL + "adapter: lora\n")).hint)


def test_nothing_alike_gets_no_suggestion(write: Write) -> None:
    assert refusal(write(MINIMAL + "zzzzzz: 3\n")).hint is None


def test_every_key_is_suggested_for_a_slip_of_the_pen(write: Write) -> None:
    letters = random.Random(0)
    for section, model in sections().items():
        for key in model.model_fields:
            if len(key) < 5:
                continue
            place = letters.randrange(1, len(key) - 1)
            slip = key[:place] + key[place + 1 :]
            error = refusal(write(MINIMAL), overrides=[f"{section}.{slip}=3"])
            assert error.hint == f"did you mean `{section}.{key}`?", slip


def test_required_keys() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict({})
    for key in ("model", "data", "output"):
        assert f"{key}: must be given" in caught.value.message
    with pytest.raises(RecipeError, match=r"model\.path: must be given"):
        recipe_from_dict({"model": {}, "data": {"train": "a"}, "output": {"dir": "x"}})


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.name=muon",
        "optimizer.name=sgd",
        "optimizer.state=int8",
        "optimizer.state=int4",
        "optimizer.master=bf16",
        "train.freeze=[embed]",
        "data.streaming=true",
        "model.attention=flash_attention_2",
        "model.attention=flash_attention_3",
    ],
)
def test_features_of_later_versions_are_refused_by_name(write: Write, override: str) -> None:
    error = refusal(write(MINIMAL), overrides=[override])
    assert type(error) is NotAvailable
    assert error.exit_code == 2
    assert override.partition("=")[0] in error.message
    assert error.message.endswith("is not available yet")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.max_grad_norm=0"], "null turns clipping off"),
        (["train.max_grad_norm=-1"], "null turns clipping off"),
        (["train.epochs=null"], "train.epochs: nothing says how long to train"),
        (["train.epochs=0"], "train.epochs: must be at least 1"),
        (["train.epochs=1.5"], "train.epochs: must be a whole number"),
        (["train.steps=10", "optimizer.warmup=11"], "11 warm-up steps are more than the 10 of train.steps"),
        (["optimizer.warmup=1.5"], "optimizer.warmup: must be a share below 1 or a whole number of steps"),
        (["optimizer.warmup=-1"], "optimizer.warmup: must be at least 0"),
        (["optimizer.lr=0"], "optimizer.lr: must be more than 0"),
        (["optimizer.betas=0.9"], "optimizer.betas: must be a list of two numbers, not `0.9`"),
        (["optimizer.betas=[0.9]"], "optimizer.betas: must be a list of two numbers, not of 1"),
        (["train.seed=99999999999999999999"], "train.seed: must be a whole number below 2^63"),
        (["optimizer.betas=[0.9, 1]"], "less than 1"),
        (["optimizer.momentum=0.5"], "adamw has no momentum"),
        (["optimizer.schedule=constant", "optimizer.min_lr_ratio=0.1"], "a constant schedule stays at lr"),
        (["data.eval=b.jsonl", "data.eval_fraction=0.1"], "data.eval already names the held-out data"),
        (["train.eval_every=5"], "there is nothing to evaluate on"),
        (["train.eval_every=5 min", "data.eval=b"], "must be a number of steps"),
        (["memory.micro_batch=64"], "64 is more than the 32 sequences of train.batch_size"),
        (["memory.slots=1"], "memory.slots: must be at least 2"),
        (['output.dir="a\\0b"'], "output.dir: must be a path, which holds no null character"),
        (["memory.threads=1000000"], "1000000 threads are more than 4096"),
        (["memory.slots=many"], "memory.slots: must be auto or a whole number"),
        (["memory.device=gpu"], "must be auto, cuda, cuda:N or cpu"),
        (["memory.vram=0"], "memory.vram: must be more than nothing"),
        (["memory.vram=24G"], "write GiB (powers of 1024) or GB"),
        (["train.freeze=['(']"], "is not a regular expression"),
        (["data.train=[]"], "data.train: must name at least one source"),
        (["data.train="], "data.train: must be a path or a list of sources, not null"),
        (["data.train=[3]"], "data.train.0.path: must be text"),
        (["data.train=[{format: text}]"], "data.train.0.path: must be given"),
        (["data.train=[{path: a, format: chatml}]"], "data.train.0.format: must be auto, messages"),
        (["data.train=[{path: a, columns: {text: 3}}]"], "data.train.0.columns: must be text"),
        (["data.train=megatrain:devl.jsonl"], "data.train"),
        (["data.max_seq_len=1"], "data.max_seq_len: must be at least 2"),
        (["output.dir=''"], "output.dir: must not be empty"),
        (["output.keep=0"], "output.keep: must be at least 1"),
        (["train.seed=-1"], "train.seed: must be at least 0"),
        (["optimizer=3"], "optimizer: must be a mapping of keys"),
    ],
)
def test_values_that_make_no_sense(write: Write, overrides: list[str], message: str) -> None:
    assert message in refusal(write(MINIMAL), overrides=overrides).message


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model_type=gpt2", "model.path"),
        ("architectures=[Foo]", "model.path"),
        ("dtype=float16", "output.export_dtype"),
        ("torch_dtype=float16", "train.precision"),
        ("attn_implementation=eager", "model.attention is meant"),
        ("id2label={0: a}", "a classifier"),
    ],
)
def test_overrides_that_would_change_nothing_are_refused_with_what_is_meant(
    write: Write, override: str, hint: str
) -> None:
    error = refusal(write(MINIMAL), overrides=[f"model.config.{override}"])
    key = f"model.config.{override.partition('=')[0]}"
    assert (error.where, error.message) == (f"--set {key}", f"{key}: would change nothing")
    assert hint in str(error.hint)


def test_a_key_that_stands_twice_in_an_override_has_no_line(write: Write) -> None:
    error = refusal(write(MINIMAL), overrides=["data.train=[{path: x, path: y}]"])
    assert (error.where, error.message) == ("--set data.train", "data.train.0.path: the key stands twice")


@pytest.mark.parametrize("key", ["train.steps", "data.train"])
def test_a_key_within_a_value_is_located_in_the_override_that_made_it(write: Write, key: str) -> None:
    error = refusal(write(MINIMAL + "train:\n  steps: 3\n"), overrides=[f"{key}.x=5"])
    assert f"--set {key}.x: {key}" in str(error).replace("\n", " ")
    assert re.search(r"\.yaml:\d", str(error)) is None


def test_checks_across_keys_are_silent_while_one_of_them_is_malformed(write: Write) -> None:
    error = refusal(write(MINIMAL), overrides=["train.steps=x", "train.epochs=null"])
    assert error.message == "train.steps: must be a whole number, not `x`"


def test_checks_across_keys_are_told_together_with_malformed_values(write: Write) -> None:
    error = refusal(write(MINIMAL), overrides=["optimizer.lr=x", "train.epochs=null"])
    assert "2 problems" in error.message
    assert "nothing says how long" in error.message
