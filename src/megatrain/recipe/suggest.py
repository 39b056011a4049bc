"""What a person probably meant by a key or a value that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from megatrain.recipe.schema import Recipe, Source
from megatrain.recipe.tree import Path, dotted

# What the same thing is called in Transformers, torchtune, axolotl and LLaMA-Factory.
_ELSEWHERE = {
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "attn_implementation": "model.attention",
    "base_model": "model.path",
    "checkpointer": "model.path",
    "clip_grad_norm": "train.max_grad_norm",
    "cutoff_len": "data.max_seq_len",
    "dataset": "data.train",
    "dataset_path": "data.train",
    "datasets": "data.train",
    "eval_dataset": "data.eval",
    "eval_steps": "train.eval_every",
    "evals_per_epoch": "train.eval_every",
    "field_messages": "data.train.0.columns",
    "flash_attn": "model.attention",
    "gradient_clipping": "train.max_grad_norm",
    "learning_rate": "optimizer.lr",
    "logging_steps": "train.log_every",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "max_length": "data.max_seq_len",
    "max_samples": "data.train.0.limit",
    "max_seq_length": "data.max_seq_len",
    "max_steps": "train.steps",
    "max_steps_per_epoch": "train.steps",
    "micro_batch_size": "memory.micro_batch",
    "model_name_or_path": "model.path",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "output_dir": "output.dir",
    "overwrite_output_dir": "output.overwrite",
    "per_device_train_batch_size": "train.batch_size",
    "pretrained_model_name_or_path": "model.path",
    "sample_packing": "data.packing",
    "save_steps": "train.save_every",
    "save_total_limit": "output.keep",
    "seq_len": "data.max_seq_len",
    "sequence_len": "data.max_seq_len",
    "total_batch_size": "train.batch_size",
    "train_on_inputs": "data.train_on",
    "trust_remote_code_model": "model.trust_remote_code",
    "val_set_size": "data.eval_fraction",
    "wandb_project": "report.wandb",
    "warmup_ratio": "optimizer.warmup",
    "warmup_steps": "optimizer.warmup",
}
_NOT_NEEDED = {
    "gradient_accumulation_steps": "there is no accumulation to set: train.batch_size is the whole step, cut to fit",
    "gradient_checkpointing": "it is always on: layers are recomputed from their stored inputs",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: bf16; fp16 needs loss scaling and is not supported",
    "tf32": "train.precision: bf16",
    "load_in_8bit": "full fine-tuning does not quantise the weights",
    "load_in_4bit": "full fine-tuning does not quantise the weights",
    "adapter": "this trains every weight; there are no adapters",
    "lora_r": "this trains every weight; there are no adapters",
    "lora": "this trains every weight; there are no adapters",
    "peft": "this trains every weight; there are no adapters",
    "quantization": "full fine-tuning does not quantise the weights",
    "fsdp": "weights stream from host memory; there is nothing to shard",
    "deepspeed": "weights stream from host memory; there is nothing to configure",
}


_LONGEST = 60  # comparing words takes the square of their length


def sections() -> dict[str, type[BaseModel]]:
    """The recipe's sections by name."""
    return {name: field.annotation for name, field in Recipe.model_fields.items() if _is_section(field.annotation)}  # type: ignore[misc]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys_of(section: type[BaseModel]) -> list[str]:
    return list(section.model_fields)


def all_keys() -> list[str]:
    """Every dotted key but those of a source."""
    return [f"{name}.{key}" for name, section in sections().items() for key in keys_of(section)]


def normal(key: str) -> str:
    """``batch-size``, ``batchSize`` and ``Batch_Size`` as ``batch_size``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").replace(" ", "_").lower()


def nearest(word: str, *, among: Iterable[str], cutoff: float = 0.7) -> str | None:
    found = difflib.get_close_matches(word, list(among), n=1, cutoff=cutoff)
    return found[0] if found else None


def hint_for_key(path: Path) -> str | None:
    """A hint for the unknown key at `path`."""
    key = normal(str(path[-1])[:_LONGEST])
    if key in _NOT_NEEDED and not _is_known(key):
        return _NOT_NEEDED[key]
    meant = _meant(key, path=path)
    return f"did you mean `{meant}`?" if meant else None


def _is_known(key: str) -> bool:
    return key in sections() or any(full.endswith(f".{key}") for full in all_keys())


def _meant(key: str, *, path: Path) -> str | None:
    in_source = path[:1] == ("data",) and len(path) > 2
    if in_source:
        here, prefix = keys_of(Source), f"{dotted(path[:-1])}."
    elif len(path) == 1:
        here, prefix = ["base", *sections()], ""
    else:
        here, prefix = keys_of(sections()[str(path[0])]), f"{path[0]}."
    if key in here:
        return f"{prefix}{key}"
    elsewhere = [full for full in all_keys() if full.split(".")[1] == key]
    if elsewhere:
        return elsewhere[0]
    if key in sections():
        return key
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    close = nearest(key, among=here)
    if close:
        return f"{prefix}{close}"
    short = {full.split(".")[1]: full for full in reversed(all_keys())}
    distant = nearest(key, among=short, cutoff=0.75)
    return short[distant] if distant else None


def hint_for_choice(value: object, *, choices: Iterable[str]) -> str | None:
    close = nearest(str(value)[:_LONGEST].lower(), among=choices, cutoff=0.6)
    return f"did you mean `{close}`?" if close else None
