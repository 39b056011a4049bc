"""The store as a Hugging Face folder: written straight from the halves, shard by shard, aside and then renamed."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig

from megatrain.errors import DiskError, UsageError
from megatrain.files import is_mount, refuse_lost_link
from megatrain.host.disk_writer import write_shard
from megatrain.host.layout_on_disk import DiskTensor, like_source, like_transformers
from megatrain.host.mapping import map_checkpoint
from megatrain.host.source import INDEX, SINGLE, has_weights, locate
from megatrain.host.store import HostStore
from megatrain.model.layout import Entry
from megatrain.units import format_size

SHARD_BYTES = 5_000_000_000
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    total_bytes: int  # of tensors
    shards: int
    dtype: str  # of the config


def export_model(
    store: HostStore,
    out: Path,
    *,
    meta_model: Any,
    source: Path | None,
    dtype: Literal["auto", "bf16", "fp32", "fp16"] = "auto",
    save_tokenizer: Callable[[Path], None] | None = None,
    threads: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write `out`, replacing an earlier export there. The optimizer must be at rest.

    With a source checkpoint: its keys, shapes, tied-ness and (auto) dtype of each tensor, its config with what was
    overridden, its generation config as it is. Without: what ``save_pretrained`` would write, in the precision of
    the store. `save_tokenizer` gets the folder being made. Raises UsageError if `out` is something else,
    DiskError if it cannot be written; an earlier export is then as it was.
    """
    out = out.absolute()
    refuse_foreign(out, source=source)
    disk = disk_tensors(store, meta_model=meta_model, source=source, dtype=dtype)
    shards = split_into_shards(disk, shard_bytes=shard_bytes)
    aside = _aside(out)
    with _disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove(aside)
        _check_space(out.parent, needed=sum(t.nbytes for t in disk))
        aside.mkdir()
        try:
            _write_weights(store, aside, shards=shards, threads=threads)
            name = _write_configs(aside, meta_model=meta_model, source=source, disk=disk, dtype=dtype)
            if save_tokenizer is not None:
                save_tokenizer(aside)
            _swap(aside, out)
        finally:
            _remove(aside)
    return Exported(out, sum(t.nbytes for t in disk), len(shards), name)


def disk_tensors(store: HostStore, *, meta_model: Any, source: Path | None, dtype: str) -> list[DiskTensor]:
    """What an export writes, before anything is written."""
    wanted = None if dtype == "auto" else DTYPES[dtype]
    units = [host.unit for host in store.units]
    stored_as: torch.dtype | None = None
    if source is not None and has_weights(source):
        found = locate(source)
        disk = like_source(found, map_checkpoint(found, units=units, meta_model=meta_model), dtype=wanted)
        if disk is not None:
            return disk
        stored_as = _most_common([(t.dtype, t.numel) for t in found.tensors.values()])

    def dtype_of(entry: Entry) -> torch.dtype:
        return (wanted or stored_as or entry.dtype) if entry.trainable else entry.dtype

    return like_transformers(meta_model, units=units, dtype_of=dtype_of)


def split_into_shards(disk: Sequence[DiskTensor], *, shard_bytes: int) -> list[list[DiskTensor]]:
    """Consecutive tensors up to `shard_bytes` together; a larger one has a shard of its own."""
    shards: list[list[DiskTensor]] = [[]]
    size = 0
    for tensor in disk:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_weights(
    store: HostStore, folder: Path, *, shards: Sequence[Sequence[DiskTensor]], threads: int | None
) -> None:
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(threads or min(16, len(os.sched_getaffinity(0))), thread_name_prefix="write") as pool:
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_shard(store, folder / name, tensors=shard, pool=pool)
            weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        tensors = [tensor for shard in shards for tensor in shard]
        sizes = {"total_parameters": sum(t.numel for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
        _write_json(folder / INDEX, {"metadata": sizes, "weight_map": weight_map})


def _write_configs(
    folder: Path, *, meta_model: Any, source: Path | None, disk: Sequence[DiskTensor], dtype: str
) -> str:
    """config.json, generation_config.json and the model's own code. Returns the dtype that the config states."""
    config = meta_model.config
    stored = _most_common([(t.dtype, t.numel) for t in disk if t.dtype.is_floating_point])
    stated = str(stored).removeprefix("torch.")
    if source is not None and (source / "config.json").is_file():
        content = _with_overrides(json.loads((source / "config.json").read_bytes()), config=config, source=source)
        for code in source.glob("*.py"):
            shutil.copyfile(code, folder / code.name)
    else:
        content = json.loads(config.to_json_string(use_diff=True))
        content["architectures"] = [type(meta_model).__name__]
    key = "torch_dtype" if "torch_dtype" in content and "dtype" not in content else "dtype"
    content[key] = stated
    _write_json(folder / "config.json", content)
    if source is not None and (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
        _warn_of_generation_config(folder)
    elif source is None and meta_model.can_generate():
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    return stated


def _with_overrides(content: dict[str, Any], *, config: Any, source: Path) -> dict[str, Any]:
    """The source's config.json as it is written, with the keys that the run changed."""
    before = type(config).from_pretrained(source).to_dict()
    ignored = {"dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path"}
    changed = {k: v for k, v in config.to_dict().items() if k not in ignored and before.get(k) != v}
    return content | changed


def _warn_of_generation_config(folder: Path) -> None:
    try:
        GenerationConfig.from_pretrained(folder).validate(strict=True)
    except (ValueError, TypeError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.warning("generation_config.json is copied as it is, though transformers refuses it: %s", first)


def _most_common(counted: Sequence[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype of most elements."""
    numel: dict[torch.dtype, int] = {}
    for dtype, count in counted:
        numel[dtype] = numel.get(dtype, 0) + count
    return max(numel, key=lambda dtype: numel[dtype])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_foreign(out: Path, *, source: Path | None) -> None:
    """Raises UsageError when an export to `out` would replace something else than an earlier export, or cannot be put
    there at all."""
    if source is not None and out.exists() and source.exists() and out.samefile(source):
        raise UsageError("the export would overwrite the source model", where=str(out), hint="choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise UsageError("the folder holds something else than a model", where=str(out), hint="choose another folder")
    if out.exists() and not out.is_dir():
        raise UsageError("is a file, not a folder", where=str(out), hint="choose another folder")
    refuse_lost_link(out)
    if is_mount(out):
        raise UsageError(
            "something is mounted there, and a model is written beside its place and renamed",
            where=str(out),
            hint=f"choose a folder below it, such as {out / 'model'}, with megatrain export or as output.dir",
        )
    for path in (_aside(out), _old(out)):
        if path.exists() and not path.is_dir() and not path.is_symlink():
            raise UsageError(
                f"is a file, and an export to {out} needs a folder of that name", where=str(path), hint="remove it"
            )


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.partial")


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _check_space(folder: Path, *, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"the exported model needs {format_size(needed)} and {format_size(free)} are free",
            where=str(folder),
            hint="free some space and run: megatrain export CHECKPOINT OUT",
        )


def _swap(aside: Path, out: Path) -> None:
    """Put the finished folder in its place. The earlier one goes only after that."""
    for path in aside.iterdir():
        _force(path)
    _force(aside)
    old = _old(out)
    _remove(old)
    if out.exists():
        out.rename(old)
    aside.rename(out)
    _force(out.parent)
    _remove(old)


def _force(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(folder: Path) -> None:
    """Of a link only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free some space and run: megatrain export CHECKPOINT OUT" if full else None
        raise DiskError(f"the model cannot be written: {error.strerror}", where=str(out), hint=hint) from error
