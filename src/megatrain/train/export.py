"""From the store, or from a checkpoint, to a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from megatrain.data import load_tokenizer
from megatrain.errors import UsageError
from megatrain.host.export import Exported, disk_tensors, export_model, refuse_foreign
from megatrain.host.store import HostStore
from megatrain.host.weights import fetch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.optim.threads import optimizer_threads
from megatrain.recipe import Recipe, recipe_from_dict
from megatrain.report.console import Console
from megatrain.stream.device import CpuDevice
from megatrain.train import manifest as manifests
from megatrain.train.checkpoint import Checkpoint, find_checkpoints, step_of
from megatrain.train.manifest import Damaged
from megatrain.train.model_config import model_path, read_config
from megatrain.train.run import Run

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
_ATTEMPTS = 5
_PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
)


@dataclass(frozen=True)
class ExportedCheckpoint:
    """What `export_checkpoint` read and wrote."""

    checkpoint: Path
    step: int
    exported: Exported


def export_run(run: Run, *, out: Path, dtype: Dtype) -> Exported:
    """Write the trained model; the optimizer must be at rest. Raises DiskError, UsageError."""
    return export_model(
        run.store,
        out,
        meta_model=run.model.meta_model,
        source=_source(run.recipe),
        dtype=dtype,
        save_tokenizer=_tokenizer_saver(run.tokenizer, recipe=run.recipe),
    )


def export_bytes(run: Run, *, dtype: Dtype) -> int:
    """Bytes of tensors that `export_run` will write."""
    disk = disk_tensors(run.store, meta_model=run.model.meta_model, source=_source(run.recipe), dtype=dtype)
    return sum(tensor.nbytes for tensor in disk)


def export_checkpoint(
    path: Path, *, out: Path, dtype: Dtype, console: Console, check: Callable[[], None]
) -> ExportedCheckpoint:
    """Write a checkpoint (a run's folder: its newest) as a model. Its moments are checked but not held in memory.

    A run that is still going removes checkpoints while they are read: then its newest is taken, a few times.
    Raises UsageError when there is no usable checkpoint.
    """
    for _ in range(_ATTEMPTS):
        checkpoint = _pick(path, console=console)
        try:
            return _export(checkpoint, out=out, dtype=dtype, console=console, check=check)
        except Damaged as error:
            if not _is_gone(checkpoint.path):
                raise UsageError(f"{checkpoint.path} is damaged: {error}", where=str(path)) from error
        if checkpoint.path == path:
            raise UsageError(
                "was removed while it was read", where=str(path), hint="give the run's folder to export its newest"
            )
        console.note(f"{checkpoint.path.name} was removed by its run while it was read; taking the newest")
    raise UsageError(
        f"each of {_ATTEMPTS} checkpoints was removed while it was read",
        where=str(path),
        hint="the run saves faster than this reads: wait until it ends, or keep more of them (output.keep)",
    )


def _export(
    checkpoint: Checkpoint, *, out: Path, dtype: Dtype, console: Console, check: Callable[[], None]
) -> ExportedCheckpoint:
    """Raises Damaged."""
    identity = checkpoint.manifest.identity
    recipe = recipe_from_dict(identity.recipe, source=str(checkpoint.path))
    refuse_foreign(out, source=_source(recipe))  # before anything is read
    if out.is_dir() and any(out.iterdir()):
        raise UsageError("holds a model already", where=str(out), hint="choose another folder, or remove this one")
    spec = ModelSpec(
        config=read_config(recipe),
        attention=recipe.model.attention,
        precision=_PRECISIONS[identity.precision],
        training=True,
        compile=False,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    model = StreamedModel.build(spec, rng=CpuDevice().rng)
    if model.sizes.config_hash != identity.config_hash:
        raise UsageError(
            f"{recipe.model.path} no longer holds the model of this checkpoint", where=str(checkpoint.path)
        )
    tokenizer = load_tokenizer(recipe)
    store = HostStore.allocate(model.anatomy, pin=False, threads=optimizer_threads(None), training=False)
    try:
        checkpoint.load_into(store, console=console, check=check)
        console.phase(f"exporting {checkpoint.path.name} to {out}")
        exported = export_model(
            store,
            out,
            meta_model=model.meta_model,
            source=_source(recipe),
            dtype=dtype,
            save_tokenizer=_tokenizer_saver(tokenizer, recipe=recipe),
        )
    finally:
        store.close()
    return ExportedCheckpoint(checkpoint.path, checkpoint.state.step, exported)


def _pick(path: Path, *, console: Console) -> Checkpoint:
    folder = path / "checkpoints"
    if not folder.is_dir():
        hint = "give a run folder or a checkpoints/step-..."
        if not path.exists():
            raise UsageError("there is no such folder", where=str(path), hint=hint)
        try:
            return Checkpoint.open(path)
        except Damaged as error:
            raise UsageError(f"is no usable checkpoint: {error}", where=str(path), hint=hint) from error
    for _ in range(_ATTEMPTS):  # between the look and the reading all that was seen may have gone, for a newer one
        found = find_checkpoints(folder)
        if found.usable or not any(_is_gone(skipped.path) for skipped in found.skipped):
            break
    newest = found.usable[0].state.step if found.usable else -1
    for skipped in found.skipped:
        if step_of(skipped.path) > newest:  # older ones are of no interest, and may be going just now
            console.warn(f"{skipped.path.name} was skipped: {skipped.reason}")
    if not found.usable:
        raise UsageError("holds no usable checkpoint", where=str(folder))
    return found.usable[0]


def _is_gone(checkpoint: Path) -> bool:
    """Whether it was removed, or is being: the manifest goes first."""
    return not (checkpoint / manifests.NAME).exists()


def _source(recipe: Recipe) -> Path | None:
    """Where keys, shapes and dtypes are taken from: the checkpoint that was trained, if one was."""
    if recipe.model.init == "random":
        return None
    return fetch(model_path(recipe), revision=recipe.model.revision)


def _tokenizer_saver(tokenizer: PreTrainedTokenizerBase, *, recipe: Recipe) -> Callable[[Path], None]:
    """Copies the tokenizer's own files where it came from a folder as it is; else has transformers write them."""
    folder = Path(tokenizer.name_or_path)

    def write(out: Path) -> None:
        tokenizer.save_pretrained(out)

    def copy(out: Path) -> None:
        for pattern in _TOKENIZER_FILES:
            for file in folder.glob(pattern):
                if file.is_dir():
                    shutil.copytree(file, out / file.name, dirs_exist_ok=True)
                else:
                    shutil.copyfile(file, out / file.name)

    return write if recipe.tokenizer.chat_template is not None or not folder.is_dir() else copy
