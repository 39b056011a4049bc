"""Which bytes of a checkpoint belong where in the store: decided by ``from_pretrained`` itself, before any is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as hf_logging

from megatrain.errors import ModelError
from megatrain.host.deferred import Applied, Deferred, Leaf, Move, Node, NotAMove, deferred, moves, plain, walk
from megatrain.host.source import Source
from megatrain.host.tensor_file import PIECE_BYTES, StoredTensor, opened, read_into
from megatrain.model.anatomy import Unit
from megatrain.model.layout import Entry

FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
_NAMED = 5  # tensors named in a message


@dataclass(frozen=True)
class Placement:
    """Where one entry comes from: moves, or (`moves` is None) a computation, or a value that is already there."""

    unit: int
    entry: Entry
    name: str  # in the model
    moves: tuple[Move, ...] | None
    node: Node | None
    value: Tensor | None = None


@dataclass(frozen=True)
class CheckpointMap:
    """A checkpoint against a model. `extras`: keys that transformers ignores for this model."""

    placements: tuple[Placement, ...]
    duplicates: dict[str, str] = field(default_factory=dict)  # key -> key of the same, tied tensor
    extras: tuple[str, ...] = ()


def map_checkpoint(source: Source, *, units: Sequence[Unit], meta_model: Any) -> CheckpointMap:
    """Match a checkpoint's tensors with the entries of every unit.

    Raises ModelError naming tensors that are missing, unexpected, misshapen, quantised, or tied and unequal.
    """
    if getattr(meta_model.config, "quantization_config", None) is not None:
        raise _quantised(source)
    duplicates: dict[str, str] = {}

    def compare(one: Node, other: Node) -> bool:
        if not (isinstance(one, Leaf) and isinstance(other, Leaf)):
            return one is other
        same = _equal(source.tensors[one.name], source.tensors[other.name])
        if same:
            duplicates[other.name] = one.name
        return same

    shapes = {n: (t.shape, torch.float32 if t.dtype in FLOATS else t.dtype) for n, t in source.tensors.items()}
    model, info = _from_pretrained(meta_model, deferred(shapes, compare=compare), source=source)
    _refuse_misfits(info, source=source)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    placements = tuple(
        _placement(index=unit.index, entry=entry, names=unit.full_names[entry.name], tensors=tensors, source=source)
        for unit in units
        for entry in unit.layout.entries
    )
    used = {move.leaf for p in placements for move in p.moves or ()}
    for p in placements:
        used |= _leaves(p.node) if p.node is not None else set()
    same: dict[str, str] = {}
    for one, other in duplicates.items():  # whichever of the two transformers kept
        if (one in used) != (other in used):
            same |= {one: other} if other in used else {other: one}
    extras = tuple(n for n in source.tensors if n not in used and n not in same)
    return CheckpointMap(placements, same, extras)


def _from_pretrained(meta_model: Any, state: dict[str, Tensor], *, source: Source) -> tuple[Any, dict[str, Any]]:
    with _quiet(), torch.random.fork_rng(devices=[]):
        try:
            model, info = type(meta_model).from_pretrained(
                None,
                config=meta_model.config,
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except RuntimeError as error:  # how transformers reports tensors that it cannot convert
            raise ModelError(f"transformers cannot load these weights: {error}", where=str(source.folder)) from error
    return model, info


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers prints its report of the load; ours is an error message or nothing."""
    level, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bar:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _refuse_misfits(info: dict[str, Any], *, source: Source) -> None:
    hint = "config.json and the weights must be of the same model; check model.path and model.config"
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has tensors that the model does not know:")):
        if names := sorted(info[key]):
            raise ModelError(f"the checkpoint {what} {_list(names)}", where=str(source.folder), hint=hint)
    if shapes := sorted((name, tuple(found), tuple(wanted)) for name, found, wanted in info["mismatched_keys"]):
        listed = _list([f"{name} {found} instead of {wanted}" for name, found, wanted in shapes])
        raise ModelError(f"tensors of another shape: {listed}", where=str(source.folder), hint=hint)


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _placement(
    *, index: int, entry: Entry, names: tuple[str, ...], tensors: dict[str, Tensor], source: Source
) -> Placement:
    found = [tensors[name] for name in names]
    if not isinstance(found[0], Deferred):  # a buffer that checkpoints may lack: transformers made it
        return Placement(index, entry, names[0], None, None, found[0].detach())
    nodes = [plain(t.node) for t in found if isinstance(t, Deferred)]
    if any(node is not nodes[0] for node in nodes):
        raise ModelError(
            f"the model ties {' and '.join(names)}, but the checkpoint has different values for them",
            where=str(source.folder),
            hint="train them apart with model.config: {tie_word_embeddings: false}",
        )
    for leaf in _leaves(nodes[0]):
        if entry.dtype.is_floating_point != (source.tensors[leaf].dtype in FLOATS):
            raise _quantised(source, leaf)
    return Placement(index, entry, names[0], _checked_moves(nodes[0], shape=entry.shape), nodes[0])


def _checked_moves(node: Node, *, shape: tuple[int, ...]) -> tuple[Move, ...] | None:
    try:
        found = tuple(moves(node))
        for move in found:
            walk(torch.empty(shape, device="meta"), steps=move.into)
    except (NotAMove, RuntimeError):  # RuntimeError: torch's view() of something that is not one in memory
        return None
    return found


def _leaves(node: Node) -> set[str]:
    names: set[str] = set()

    def visit(part: Any) -> None:
        if isinstance(part, Leaf):
            names.add(part.name)
        elif isinstance(part, list | tuple):
            for item in part:
                visit(item)
        elif isinstance(part, dict):
            visit(list(part.values()))
        elif isinstance(part, Applied):
            visit(part.args)
            visit(part.kwargs)

    visit(node)
    return names


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    with opened({one.path, other.path}) as fds:
        for start in range(0, one.nbytes, PIECE_BYTES):
            blocks = []
            for tensor in (one, other):
                block = torch.empty(min(PIECE_BYTES, one.nbytes - start), dtype=torch.uint8)
                read_into(block, fd=fds[tensor.path], offset=tensor.offset + start)
                blocks.append(block)
            if not torch.equal(*blocks):
                return False
    return True


def _quantised(source: Source, name: str | None = None) -> ModelError:
    what = f"{name} is stored as {source.tensors[name].dtype}" if name else "config.json has a quantization_config"
    return ModelError(
        f"the weights are quantised ({what})".replace("torch.", ""),
        where=str(source.folder),
        hint="full fine-tuning needs the original weights: bf16, fp16 or fp32",
    )
