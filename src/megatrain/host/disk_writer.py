"""One exported safetensors file, piece by piece from the store: never more than a few MiB a thread beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.host import halves
from megatrain.host.deferred import evaluate, walk
from megatrain.host.layout_on_disk import DiskTensor, Part
from megatrain.host.store import HostStore
from megatrain.host.tensor_file import PIECE_BYTES, Slot, created, header_bytes, opened, read_into, write_from
from megatrain.model.layout import Entry


def write_shard(store: HostStore, path: Path, *, tensors: Sequence[DiskTensor], pool: Executor) -> None:
    """Write the tensors to a new file that is on the disk when this returns. Raises OSError."""
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)  # wide dtypes first: all are aligned
    header = header_bytes([Slot(t.name, t.dtype, t.shape) for t in ordered], metadata={"format": "pt"})
    with created(path) as fd:
        write_from(torch.frombuffer(bytearray(header), dtype=torch.uint8), fd=fd, offset=0)
        offset = len(header)
        jobs: list[Callable[[], None]] = []
        for tensor in ordered:
            jobs += _jobs(store, tensor, fd=fd, offset=offset)
            offset += tensor.nbytes
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def _jobs(store: HostStore, tensor: DiskTensor, *, fd: int, offset: int) -> Iterator[Callable[[], None]]:
    if tensor.copied is not None:
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            yield partial(_copy, tensor, start=start, fd=fd, offset=offset + start)
    elif len(tensor.parts) == 1 and not tensor.parts[0].into:
        yield from _run_jobs(store, tensor, tensor.parts[0], fd=fd, offset=offset)
    else:
        yield partial(_assemble, store, tensor, fd=fd, offset=offset)


def _run_jobs(
    store: HostStore, tensor: DiskTensor, part: Part, *, fd: int, offset: int
) -> Iterator[Callable[[], None]]:
    """A tensor that is one view of an entry: in runs of elements, or of rows where it is not one run of memory."""
    streamed, low = _views(store, part)
    if streamed.is_contiguous():
        streamed, low = streamed.view(-1), None if low is None else low.view(-1)
    if streamed.ndim == 0 or tensor.numel == 0:
        yield partial(_convert_and_write, tensor, part.entry, streamed, low, fd=fd, offset=offset)
        return
    row = tensor.numel // len(streamed)
    rows = max(1, PIECE_BYTES // 4 // row)
    for start in range(0, len(streamed), rows):
        run = slice(start, start + rows)
        at = offset + start * row * tensor.dtype.itemsize
        job = partial(
            _convert_and_write, tensor, part.entry, streamed[run], None if low is None else low[run], fd=fd, offset=at
        )
        yield job


def _views(store: HostStore, part: Part) -> tuple[Tensor, Tensor | None]:
    unit, entry = store.units[part.unit], part.entry
    streamed = walk(unit.streamed(entry), steps=part.out_of)
    return streamed, walk(unit.low(entry), steps=part.out_of) if has_low(entry) else None


def has_low(entry: Entry) -> bool:
    """Whether an entry is kept as two halves."""
    return entry.trainable and entry.dtype is torch.bfloat16


def _convert_and_write(
    tensor: DiskTensor, entry: Entry, streamed: Tensor, low: Tensor | None, *, fd: int, offset: int
) -> None:
    write_from(converted(streamed, low, dtype=tensor.dtype, name=tensor.name), fd=fd, offset=offset)


def converted(streamed: Tensor, low: Tensor | None, *, dtype: torch.dtype, name: str) -> Tensor:
    """A view of an entry in another dtype, contiguous; itself if nothing has to change.

    bf16 is the streamed half: masters round half away from zero. Raises ModelError when fp16 cannot hold a value.
    """
    if streamed.dtype is dtype and (low is None or dtype is torch.bfloat16):
        return streamed.contiguous()
    if low is not None:
        exact = torch.empty(streamed.shape, dtype=torch.float32)
        halves.join(streamed.contiguous(), low.contiguous(), out=exact)
    else:
        exact = streamed.contiguous()
    if exact.dtype is torch.float32 and dtype is torch.bfloat16:
        out = torch.empty(exact.shape, dtype=dtype)
        halves.split(exact, hi=out, lo=torch.empty(exact.shape, dtype=torch.int16))
        return out
    out = exact.to(dtype)
    if dtype is torch.float16 and bool((out.isinf() & exact.isfinite()).any()):
        raise ModelError(f"{name} has values that fp16 cannot hold", hint="export as bf16 or fp32")
    return out


def _assemble(store: HostStore, tensor: DiskTensor, *, fd: int, offset: int) -> None:
    """A tensor of several parts, or a computed one: made whole, then written."""
    if tensor.node is not None:
        whole = evaluate(tensor.node, leaves=lambda name: _master(store, name)).to(tensor.dtype)
    else:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for part in tensor.parts:
            streamed, low = _views(store, part)
            place = walk(whole, steps=part.into)
            place.copy_(converted(streamed, low, dtype=tensor.dtype, name=tensor.name).view(place.shape))
    write_from(whole.contiguous(), fd=fd, offset=offset)


def _master(store: HostStore, name: str) -> Tensor:
    for unit in store.units:
        for entry in unit.unit.layout.entries:
            if name in unit.unit.full_names[entry.name]:
                return unit.master(entry) if entry.trainable else unit.streamed(entry)
    raise RuntimeError(f"no unit has {name}")


def _copy(tensor: DiskTensor, *, start: int, fd: int, offset: int) -> None:
    stored = tensor.copied
    assert stored is not None  # the caller chose this job because it is there
    block = torch.empty(min(PIECE_BYTES, stored.nbytes - start), dtype=torch.uint8)
    with opened([stored.path]) as fds:
        read_into(block, fd=fds[stored.path], offset=stored.offset + start)
    write_from(block, fd=fd, offset=offset)
