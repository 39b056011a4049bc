"""The recipe: every key a user can write, its type, its default, and what it means.

The descriptions are the reference: `recipe new`, `recipe schema` and the documentation are made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatrain.recipe.fields import (
    AutoCount,
    AutoSlots,
    Betas,
    Count,
    DeviceName,
    Expressions,
    Flag,
    GradientNorm,
    Interval,
    Natural,
    NonNegative,
    Overrides,
    PathText,
    Positive,
    Renames,
    Share,
    ShareBelowOne,
    Size,
    StepsOrEpochs,
    Template,
    Text,
    mistake,
    to_choice,
)
from megatrain.recipe.scalars import Word, resolve, shown

_CHOICE = BeforeValidator(to_choice)


def to_sources(value: object) -> object:
    """A path, a mapping, or a list of either, as a tuple of mappings."""
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise mistake(f"must be a path or a list of sources, not {shown(value)}")
    if not value:
        raise mistake("must name at least one source")
    return tuple(item if isinstance(item, (Mapping, Source)) else {"path": item} for item in value)


def to_optional_sources(value: object) -> object:
    return None if value is None else to_sources(value)


class Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", protected_namespaces=())


class Model(Section):
    path: PathText = Field(description="hub id, or a folder with config.json (+ safetensors)")
    revision: Text = Field("main", description="branch, tag or commit of a hub id")
    init: Annotated[Literal["pretrained", "random"], _CHOICE] = Field(
        "pretrained", description="random: drawn from the architecture's own initialisation with train.seed"
    )
    attention: Annotated[Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"], _CHOICE] = Field(
        "auto", description="attention implementation of transformers"
    )
    trust_remote_code: Flag = Field(False, description="run the Python code that comes with the model")
    config: Overrides = Field(
        default_factory=dict, description="overrides of config.json, e.g. {max_position_embeddings: 65536}"
    )


class Tokenizer(Section):
    path: PathText | None = Field(None, description="hub id or folder; null: model.path")
    chat_template: Template | None = Field(
        None, description="a .jinja file or inline text; null: the tokenizer's own template"
    )


class Source(Section):
    """One source of rows. A plain path stands for ``{path: ...}``."""

    path: PathText = Field(description="file, glob, folder, or hub id; json, jsonl, csv, parquet, arrow, txt")
    format: Annotated[Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"], _CHOICE] = Field(
        "auto", description="what a row looks like; auto: seen from its columns"
    )
    split: Text = Field("train", description="split of a hub data set")
    subset: Text | None = Field(None, description="configuration of a hub data set")
    columns: Renames = Field(
        default_factory=dict, description="renames, e.g. {prompt: question, completion: answer, role: from}"
    )
    limit: Count | None = Field(None, description="use only the first so many rows")
    weight: Positive = Field(1.0, description="multiplies how often its rows are drawn in an epoch")


class Data(Section):
    train: Annotated[tuple[Source, ...], BeforeValidator(to_sources)] = Field(
        description="a path, or a list of paths and mappings"
    )
    eval: Annotated[tuple[Source, ...] | None, BeforeValidator(to_optional_sources)] = Field(
        None, description="held-out data in the same form as train"
    )
    eval_fraction: ShareBelowOne = Field(0.0, description="or hold out this share of train")
    max_seq_len: Annotated[Count, Field(ge=2)] = Field(2048, description="longest sequence, in tokens")
    packing: Flag = Field(True, description="fill sequences with whole documents, which never see each other")
    train_on: Annotated[Literal["assistant", "last_assistant", "all"], _CHOICE] = Field(
        "assistant", description="which turns have labels: every assistant turn, the last one, or everything"
    )
    system: Text | None = Field(None, description="system turn for conversations that have none")
    long_rows: Annotated[Literal["auto", "truncate", "split", "skip", "error"], _CHOICE] = Field(
        "auto", description="rows beyond max_seq_len; auto: split for text, truncate for the rest"
    )
    bad_rows: Annotated[Literal["error", "skip"], _CHOICE] = Field(
        "error", description="rows with null answers, broken JSON, an unknown role, or no token left to learn"
    )
    shuffle: Flag = Field(True, description="a new order each epoch, from train.seed")
    streaming: Flag = Field(False, description="read rows as they are needed instead of preparing them first")


class Train(Section):
    epochs: Count | None = Field(1, description="passes over the data; null when only steps is given")
    steps: Count | None = Field(None, description="optimizer steps; with epochs: whichever comes first")
    batch_size: Count = Field(
        32, description="sequences (packed: of max_seq_len) per optimizer step, whatever the memory"
    )
    precision: Annotated[Literal["auto", "bf16", "fp32"], _CHOICE] = Field(
        "auto", description="auto: bf16 on an accelerator, fp32 on the CPU; masters are fp32 either way"
    )
    max_grad_norm: GradientNorm = Field(1.0, description="exact global-norm clipping; null: off")
    nonfinite: Annotated[Literal["stop", "skip", "ignore"], _CHOICE] = Field(
        "stop", description="a step whose loss or gradient norm is not finite: end the run, skip it, or do not look"
    )
    deterministic: Flag = Field(False, description="deterministic kernels on the GPU: bit-exact repeats, slower")
    freeze: Expressions = Field(default=(), description="regular expressions on names of parameters not to train")
    seed: Natural = Field(0, description="order of the data, dropout, random initialisation")
    eval_every: StepsOrEpochs = Field(None, description='steps, or "1 epoch"; null: at the end only')
    save_every: Interval = Field(None, description='steps, "1 epoch", or "30 min"; null: at the end only')
    log_every: Count = Field(1, description="steps between lines of progress")


class Optimizer(Section):
    name: Annotated[Literal["adamw", "muon", "sgd"], _CHOICE] = Field("adamw", description="update rule")
    lr: Positive = Field(1.0e-5, description="peak learning rate")
    betas: Betas = Field((0.9, 0.999), description="decay of AdamW's two moments")
    eps: Positive = Field(1.0e-8, description="AdamW's epsilon")
    weight_decay: NonNegative = Field(0.0, description="on every trainable tensor of rank >= 2, embeddings included")
    decay_all: Flag = Field(False, description="decay tensors of rank 1 (norms, ...) too; never biases")
    momentum: ShareBelowOne = Field(0.95, description="of muon and sgd")
    master: Annotated[Literal["fp32", "bf16"], _CHOICE] = Field(
        "fp32", description="master weights: fp32 is lossless, bf16 rounds stochastically"
    )
    state: Annotated[Literal["fp32", "bf16", "int8", "int4"], _CHOICE] = Field(
        "fp32", description="what the moments are stored in; bf16: stochastically rounded, 10 bytes a parameter, not 14"
    )
    schedule: Annotated[Literal["constant", "linear", "cosine", "wsd"], _CHOICE] = Field(
        "cosine", description="course of the learning rate after the warm-up"
    )
    warmup: NonNegative = Field(0.03, description="share of the steps if < 1, else steps")
    min_lr_ratio: Share = Field(0.0, description="share of lr that the schedule ends at")


class Memory(Section):
    """Where things live. Nothing here changes the mathematics, only memory and speed."""

    device: DeviceName = Field("auto", description="auto, cuda, cuda:N or cpu")
    vram: Size = Field("auto", description="hard ceiling, e.g. 24GiB: the process never takes more")
    host: Size = Field("auto", description="ceiling; auto: the smallest of RAM, cgroup limit and rlimits")
    micro_batch: AutoCount = Field("auto", description="sequences on the device at once")
    slots: AutoSlots = Field("auto", description="weight slots in the ring, at least 2")
    activations: Annotated[Literal["auto", "device", "host"], _CHOICE] = Field(
        "auto", description="where the layers' inputs, and what attention gave, wait for the backward"
    )
    compile: Annotated[Literal["auto", "off"], _CHOICE] = Field("auto", description="torch.compile of the layers")
    threads: AutoCount = Field("auto", description="CPU optimizer threads; auto: from the cores this process may use")


class Output(Section):
    dir: PathText = Field(description="folder of the run; refused if it holds another, unless --resume or overwrite")
    overwrite: Flag = Field(False, description="replace a run that is there")
    keep: Count = Field(2, description="complete checkpoints kept")
    export: Flag = Field(True, description="write dir/model, a Hugging Face folder, at the end")
    export_dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], _CHOICE] = Field(
        "auto", description="auto: what the source checkpoint had"
    )


class Report(Section):
    tensorboard: Flag = Field(False, description="write TensorBoard events to dir/tensorboard")
    wandb: Text | None = Field(None, description="Weights & Biases project")


class Recipe(Section):
    """One run, resolved: immutable, and equal to what ``recipe.yaml`` in its folder says."""

    model: Model = Field(description="what is trained")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="how text becomes tokens")
    data: Data = Field(description="what it is trained on")
    train: Train = Field(default_factory=Train, description="for how long, in which steps")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="how the weights move")
    memory: Memory = Field(
        default_factory=Memory, description="where things live; memory and speed, not the mathematics"
    )
    output: Output = Field(description="what it leaves")
    report: Report = Field(default_factory=Report, description="who else is told")

    def to_dict(self) -> dict[str, Any]:
        """Plain values in the recipe's own notation (sizes as ``24GiB``, intervals as ``1 epoch``)."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """A recipe file: `load_recipe` of it gives an equal Recipe."""
        return yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes numbers and text so that our reader, YAML 1.1 and YAML 1.2 take them for the same; ``${`` stays text."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    if e and "." not in mantissa:
        text = f"{mantissa}.0e{exponent}"
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style: str | None = None
    if "\n" in value:
        style = "|"
    elif isinstance(resolve(value), Word) or not isinstance(resolve(value), str):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value.replace("${", "$${"), style=style)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(str, _text)
