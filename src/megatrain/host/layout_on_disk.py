"""Which tensors an exported model has, and where in the store every part of each comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megatrain.host.deferred import Deferred, Node, NotAMove, Step, deferred, moves
from megatrain.host.mapping import CheckpointMap
from megatrain.host.source import Source
from megatrain.host.tensor_file import StoredTensor
from megatrain.model.anatomy import Unit
from megatrain.model.layout import Entry


@dataclass(frozen=True)
class Part:
    """``disk tensor[into] = entry[out_of]``."""

    unit: int
    entry: Entry
    out_of: tuple[Step, ...]
    into: tuple[Step, ...]


@dataclass(frozen=True)
class DiskTensor:
    """A tensor of the exported model: parts of entries, a computation, or bytes of the source that nobody trains."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...] = ()
    node: Node | None = None  # over names of the model
    copied: StoredTensor | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def like_source(source: Source, mapping: CheckpointMap, *, dtype: torch.dtype | None) -> list[DiskTensor] | None:
    """The source's own keys, in its order. dtype None: each tensor's own.

    None where that cannot be: a tensor of the checkpoint was computed from, not moved, or not used whole.
    """
    if any(p.node is not None and p.moves is None for p in mapping.placements):
        return None
    parts: dict[str, list[Part]] = {}
    trained: set[str] = set()
    for placement in mapping.placements:
        for move in placement.moves or ():
            part = Part(placement.unit, placement.entry, out_of=move.into, into=move.out_of)
            parts.setdefault(move.leaf, []).append(part)
            if placement.entry.trainable:
                trained.add(move.leaf)
    disk = []
    for name, stored in source.tensors.items():
        key = mapping.duplicates.get(name, name)
        own = tuple(parts.get(key, ()))
        if key not in trained:  # ignored by the model, or a buffer: nobody changed it, and a store may round it
            disk.append(DiskTensor(name, stored.shape, stored.dtype, copied=stored))
            continue
        if sum(_numel(part) for part in own) != stored.numel:
            return None
        disk.append(DiskTensor(name, stored.shape, dtype or stored.dtype, parts=own))
    return disk


def _numel(part: Part) -> int:
    view = torch.empty(part.entry.shape, device="meta")
    for method, args in part.out_of:
        view = getattr(view, method)(*args)
    return view.numel()


def like_transformers(
    meta_model: Any, *, units: Sequence[Unit], dtype_of: Callable[[Entry], torch.dtype]
) -> list[DiskTensor]:
    """The keys that ``save_pretrained`` would write: its own code maps the model's names to those of a checkpoint."""
    with torch.device("meta"):
        model = type(meta_model)(meta_model.config)
    entries = {unit.full_names[e.name]: (unit.index, e) for unit in units for e in unit.layout.entries}
    tied = set(model.all_tied_weights_keys)
    ignored = model._keys_to_ignore_on_save or ()
    by_name: dict[str, tuple[int, Entry]] = {}
    for names, found in entries.items():
        own = [n for n in names if n not in tied] or list(names)
        if own[0] not in ignored:
            by_name[own[0]] = found
    shapes = {n: (e.shape, torch.float32 if e.trainable else e.dtype) for n, (_, e) in by_name.items()}
    state = revert_weight_conversion(model, deferred(shapes, compare=lambda one, other: one is other))
    return [_disk_tensor(name, tensor, by_name=by_name, dtype_of=dtype_of) for name, tensor in state.items()]


def _disk_tensor(
    name: str, tensor: Tensor, *, by_name: dict[str, tuple[int, Entry]], dtype_of: Callable[[Entry], torch.dtype]
) -> DiskTensor:
    if not isinstance(tensor, Deferred):
        raise RuntimeError(f"{name} did not come from the store")
    shape = tuple(tensor.shape)
    try:
        found = tuple(moves(tensor.node))
    except NotAMove:
        return DiskTensor(name, shape, tensor.dtype, node=tensor.node)
    parts = tuple(Part(*by_name[move.leaf], out_of=move.out_of, into=move.into) for move in found)
    return DiskTensor(name, shape, dtype_of(parts[0].entry), parts=parts)
