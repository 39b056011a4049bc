"""What a recipe may not say although each of its values is well formed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatrain.errors import RecipeError
from megatrain.recipe.assets import is_asset, resolve_asset
from megatrain.recipe.schema import Recipe

_MOST_THREADS = 4096
_OF_THE_MODEL = "model.path says which model it is"
_OF_CLASSIFIERS = "they are the labels of a classifier"
_OF_CALLS = "training decides what it asks of the model"
_NO_OVERRIDES = {
    "model_type": _OF_THE_MODEL,
    "architectures": _OF_THE_MODEL,
    "auto_map": _OF_THE_MODEL,
    "_name_or_path": _OF_THE_MODEL,
    "name_or_path": _OF_THE_MODEL,
    "_commit_hash": "model.revision is meant",
    "revision": "model.revision is meant",
    "trust_remote_code": "model.trust_remote_code is meant",
    "attn_implementation": "model.attention is meant",
    "_attn_implementation": "model.attention is meant",
    "dtype": "train.precision says what is computed in, output.export_dtype what the export has",
    "torch_dtype": "train.precision says what is computed in, output.export_dtype what the export has",
    "transformers_version": "it is that of the library",
    "output_attentions": _OF_CALLS,
    "output_hidden_states": _OF_CALLS,
    "return_dict": _OF_CALLS,
    "num_labels": _OF_CLASSIFIERS,
    "id2label": _OF_CLASSIFIERS,
    "label2id": _OF_CLASSIFIERS,
    "problem_type": _OF_CLASSIFIERS,
}
"""Keys of a config.json that would change nothing here, and why."""


@dataclass(frozen=True)
class Finding:
    """A mistake in the first of `keys`; the others are involved, and it is moot while one of them is malformed."""

    keys: tuple[str, ...]
    text: str
    hint: str | None = None
    available_later: bool = False


def check(recipe: Recipe) -> Iterator[Finding]:
    """Everything that can be known without files, devices and numbers of rows."""
    for rule in _RULES:
        yield from rule(recipe)


def _overrides(recipe: Recipe) -> Iterator[Finding]:
    for key in recipe.model.config:
        if key in _NO_OVERRIDES:
            yield Finding((f"model.config.{key}",), "would change nothing", _NO_OVERRIDES[key])


def _length(recipe: Recipe) -> Iterator[Finding]:
    train, warmup = recipe.train, recipe.optimizer.warmup
    if train.epochs is None and train.steps is None:
        yield Finding(
            ("train.epochs", "train.steps"), "nothing says how long to train", "give train.epochs or train.steps"
        )
    if warmup >= 1 and warmup != int(warmup):
        yield Finding(("optimizer.warmup",), f"must be a share below 1 or a whole number of steps, not {warmup:g}")
    elif warmup >= 1 and train.steps is not None and warmup > train.steps:
        yield Finding(
            ("optimizer.warmup", "train.steps"),
            f"{warmup:g} warm-up steps are more than the {train.steps} of train.steps",
        )


def _evaluation(recipe: Recipe) -> Iterator[Finding]:
    data = recipe.data
    if data.eval is not None and data.eval_fraction > 0:
        yield Finding(
            ("data.eval_fraction", "data.eval"), "data.eval already names the held-out data", "give one of them"
        )
    if recipe.train.eval_every is not None and data.eval is None and data.eval_fraction == 0:
        yield Finding(
            ("train.eval_every", "data.eval", "data.eval_fraction"),
            "there is nothing to evaluate on",
            "give data.eval or data.eval_fraction",
        )


def _optimizer(recipe: Recipe) -> Iterator[Finding]:
    optimizer = recipe.optimizer
    momentum = type(optimizer).model_fields["momentum"].default
    if optimizer.name == "adamw" and optimizer.momentum != momentum:
        yield Finding(("optimizer.momentum", "optimizer.name"), "adamw has no momentum", "its counterpart is betas[0]")
    if optimizer.schedule == "constant" and optimizer.min_lr_ratio != 0:
        yield Finding(
            ("optimizer.min_lr_ratio", "optimizer.schedule"),
            "a constant schedule stays at lr",
            "remove it, or take another schedule",
        )


def _micro_batch(recipe: Recipe) -> Iterator[Finding]:
    rows, whole = recipe.memory.micro_batch, recipe.train.batch_size
    if isinstance(rows, int) and rows > whole:
        yield Finding(
            ("memory.micro_batch", "train.batch_size"), f"{rows} is more than the {whole} sequences of train.batch_size"
        )


def _threads(recipe: Recipe) -> Iterator[Finding]:
    threads = recipe.memory.threads
    if isinstance(threads, int) and threads > _MOST_THREADS:
        yield Finding(("memory.threads",), f"{threads} threads are more than {_MOST_THREADS}, which no machine can use")


def _assets(recipe: Recipe) -> Iterator[Finding]:
    named = [("model.path", recipe.model.path), ("tokenizer.path", recipe.tokenizer.path)]
    for key, sources in (("data.train", recipe.data.train), ("data.eval", recipe.data.eval or ())):
        named += [(f"{key}.{index}.path", source.path) for index, source in enumerate(sources)]
    for key, path in named:
        if path is not None and is_asset(path):
            try:
                resolve_asset(path)
            except RecipeError as error:
                yield Finding((key,), error.message, error.hint)


def _later(recipe: Recipe) -> Iterator[Finding]:
    """Features of the contract that this version refuses rather than ignores."""
    optimizer = recipe.optimizer
    asked = [
        ("optimizer.name", optimizer.name, optimizer.name != "adamw"),
        ("optimizer.state", optimizer.state, optimizer.state not in ("fp32", "bf16")),
        ("optimizer.master", optimizer.master, optimizer.master != "fp32"),
        ("train.freeze", "freezing parameters", bool(recipe.train.freeze)),
        ("data.streaming", "streaming data", recipe.data.streaming),
        ("model.attention", recipe.model.attention, recipe.model.attention.startswith("flash_attention")),
    ]
    for key, what, wanted in asked:
        if wanted:
            yield Finding((key,), f"`{what}` is not available yet", available_later=True)


_RULES: tuple[Callable[[Recipe], Iterator[Finding]], ...] = (
    _overrides,
    _length,
    _evaluation,
    _optimizer,
    _micro_batch,
    _threads,
    _assets,
    _later,
)
