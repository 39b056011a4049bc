"""Filling the store: a pretrained checkpoint read straight into place, or the architecture's own initialisation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.host import halves
from megatrain.host.deferred import Move, evaluate, walk
from megatrain.host.mapping import CheckpointMap, Placement, map_checkpoint
from megatrain.host.source import Source, fetch, has_weights, locate
from megatrain.host.store import HostStore, HostUnit
from megatrain.host.tensor_file import PIECE_BYTES, StoredTensor, forget, opened, read_into
from megatrain.model.anatomy import Unit

__all__ = ["check_pretrained", "fetch", "has_weights", "load_pretrained"]

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes in all."""


def load_pretrained(
    store: HostStore,
    *,
    source: Path,
    meta_model: Any,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Read a checkpoint folder into a store that is fresh from `allocate` (all zero).

    Several threads read pieces of a few MiB to where they stay; no tensor is held twice. bf16 sources become
    the streamed halves as they are, others are rounded (masters keep every bit of fp32).
    Raises ModelError naming a tensor that is missing, unexpected, misshapen, not finite or quantised, or a
    damaged file.
    """
    found = locate(source)
    mapping = map_checkpoint(found, units=[unit.unit for unit in store.units], meta_model=meta_model)
    with opened(found.files) as fds:
        _computed(store, mapping, source=found, fds=fds)
        pieces = sorted(_pieces(store, mapping, source=found), key=lambda p: (p.stored.path, p.offset))
        _run(pieces, fds=fds, threads=threads or min(16, len(os.sched_getaffinity(0))), progress=progress)


def check_pretrained(source: Path, *, units: Sequence[Unit], meta_model: Any) -> None:
    """Raise what `load_pretrained` would for names, shapes and dtypes, from the files' headers; of the values only
    those of tensors that must be equal are read."""
    map_checkpoint(locate(source), units=units, meta_model=meta_model)


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a stored tensor and the memory that they fill."""

    stored: StoredTensor
    first: int  # element
    count: int
    out_of: tuple[Any, ...]  # views of the stored tensor (then it is one piece)
    hi: Tensor  # as streamed, any strides; the shape of what is moved
    lo: Tensor | None  # int16: low halves of a bf16 parameter
    trainable: bool

    @property
    def offset(self) -> int:
        return self.stored.offset + self.first * self.stored.dtype.itemsize


def _pieces(store: HostStore, mapping: CheckpointMap, *, source: Source) -> Iterator[_Piece]:
    for placement in mapping.placements:
        for move in placement.moves or ():
            yield from _pieces_of(store.units[placement.unit], placement, move, stored=source.tensors[move.leaf])


def _pieces_of(unit: HostUnit, placement: Placement, move: Move, *, stored: StoredTensor) -> Iterator[_Piece]:
    entry = placement.entry
    hi = walk(unit.streamed(entry), steps=move.into)
    has_low = entry.trainable and entry.dtype is torch.bfloat16
    lo = walk(unit.low(entry), steps=move.into) if has_low else None
    if move.out_of or stored.numel == 0:
        yield _Piece(stored, 0, stored.numel, move.out_of, hi, lo, entry.trainable)
        return
    if hi.is_contiguous():  # any run of elements fills one run of memory
        hi, lo = hi.view(-1), None if lo is None else lo.view(-1)
        row = 1
    else:
        row = stored.row_numel
    rows = max(1, PIECE_BYTES // stored.dtype.itemsize // max(1, row))
    for start in range(0, max(1, stored.numel // max(1, row)), rows):
        part = slice(start, start + rows)
        high, low = (hi, lo) if hi.ndim == 0 else (hi[part], None if lo is None else lo[part])
        yield _Piece(stored, start * row, high.numel(), (), high, low, entry.trainable)


def _run(pieces: list[_Piece], *, fds: dict[Path, int], threads: int, progress: Progress | None) -> None:
    total = sum(p.count * p.stored.dtype.itemsize for p in pieces)
    done = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        futures = {pool.submit(_fill, piece, fd=fds[piece.stored.path]): piece for piece in pieces}
        try:
            for future in as_completed(futures):
                future.result()
                piece = futures[future]
                done += piece.count * piece.stored.dtype.itemsize
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fill(piece: _Piece, *, fd: int) -> None:
    stored, nbytes = piece.stored, piece.count * piece.stored.dtype.itemsize
    straight = stored.dtype is piece.hi.dtype and piece.hi.is_contiguous() and not piece.out_of
    block = piece.hi if straight else torch.empty(piece.count, dtype=stored.dtype)
    read_into(block, fd=fd, offset=piece.offset)
    forget(fd=fd, offset=piece.offset, nbytes=nbytes)
    if piece.trainable:
        check_fit(block, streamed=piece.hi.dtype, name=stored.name, first=piece.first, path=stored.path)
    if straight:
        return  # and the low halves, if any, are zero
    if piece.out_of:
        block = walk(block.view(stored.shape), steps=piece.out_of)
    place(block.reshape(piece.hi.shape), hi=piece.hi, lo=piece.lo)


def check_fit(block: Tensor, *, streamed: torch.dtype, name: str, first: int, path: Path | str) -> None:
    """Refuse weights that are NaN, infinite, or infinite in their streamed dtype. block: a run of elements."""
    values = block if block.dtype in (torch.bfloat16, torch.float32) else block.float()
    unfit = halves.first_unfit(values, streamed=streamed)
    if unfit is None:
        return
    value = float(block.reshape(-1)[unfit])
    what = "is not finite" if not torch.tensor(value).isfinite() else "is infinite in bf16"
    raise ModelError(
        f"{name} {what}: element {first + unfit} is {value}",
        where=str(path),
        hint="the checkpoint is damaged or its training diverged; use another one",
    )


def place(values: Tensor, *, hi: Tensor, lo: Tensor | None) -> None:
    """Write values to where they live. values, hi, lo: one shape, any strides; lo: int16, if `hi` is half a master."""
    if lo is None:
        hi.copy_(values)
        return
    exact = values.to(torch.float32).contiguous()
    if hi.is_contiguous() and lo.is_contiguous():
        halves.split(exact, hi=hi, lo=lo)
        return
    high, low = torch.empty(hi.shape, dtype=hi.dtype), torch.empty(lo.shape, dtype=lo.dtype)
    halves.split(exact, hi=high, lo=low)
    hi.copy_(high)
    lo.copy_(low)


def _computed(store: HostStore, mapping: CheckpointMap, *, source: Source, fds: dict[Path, int]) -> None:
    """Entries that are no moves, one at a time: what transformers made itself, or computes from the checkpoint."""

    def leaf(name: str) -> Tensor:
        stored = source.tensors[name]
        block = torch.empty(stored.shape, dtype=stored.dtype)
        read_into(block, fd=fds[stored.path], offset=stored.offset)
        return block.float() if stored.dtype.is_floating_point else block

    for placement in mapping.placements:
        if placement.moves is not None:
            continue
        unit, entry = store.units[placement.unit], placement.entry
        value = placement.value if placement.node is None else evaluate(placement.node, leaves=leaf)
        assert value is not None  # a placement has moves, a node or a value
        has_low = entry.trainable and entry.dtype is torch.bfloat16
        if entry.trainable:
            exact = value.float().contiguous()
            check_fit(exact, streamed=entry.dtype, name=placement.name, first=0, path=source.folder)
        place(value.reshape(entry.shape), hi=unit.streamed(entry), lo=unit.low(entry) if has_low else None)
