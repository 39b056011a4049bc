"""One safetensors file per unit with all of its training state, straight from memory to disk and back.

The checksum is the SHA-256 of the SHA-256s of header and pieces, so that threads can share the work; that of the
weights is the same over the pieces of `lo` and `hi` alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.host.store import HostUnit
from megatrain.host.tensor_file import (
    Slot,
    TensorFile,
    as_bytes,
    created,
    forget,
    header_bytes,
    read_header,
    read_into,
    write_from,
)

HASHED_BYTES = 16 << 20
"""Bytes of a tensor that are hashed together. Part of what the checksum means."""
_MASTERS = ("lo", "hi")


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written or read."""

    bytes: int
    checksum: str  # hexadecimal
    weights: str  # the same of the masters alone, whatever the optimizer keeps beside them


def write_unit(path: Path, unit: HostUnit, *, taken: Callable[[], None] = lambda: None) -> FileRecord:
    """Write a unit's weights, moments and step counts to a new file, forced to the disk. Raises OSError.

    `taken` is called when the kernel has every byte and the unit may change again; forcing them comes after that.
    """
    tensors = _tensors(unit)
    slots = [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    metadata = {"unit": unit.unit.name, "version": str(unit.version)}
    header = header_bytes(slots, metadata=metadata)
    with created(path) as fd:
        write_from(torch.frombuffer(bytearray(header), dtype=torch.uint8), fd=fd, offset=0)
        sums = _each_piece(tensors, header=header, move=lambda b, at: write_from(b, fd=fd, offset=at))
        taken()
    return FileRecord(len(header) + sum(s.nbytes for s in slots), sums.all, sums.weights)


def read_unit(path: Path, unit: HostUnit) -> FileRecord:
    """Read a unit's file straight into place and say what it was; the caller compares.

    Raises OSError or ValueError when it is not the file of this unit; the unit may then be half overwritten.
    Where the unit has no moments (allocated with training=False), they are checked but not kept.
    """
    file = _header(path)
    tensors = _tensors(unit)
    stored = {t.name: (t.dtype, t.shape) for t in file.tensors}
    for name, tensor in tensors.items():
        if not tensor.numel() and name.startswith("exp_avg") and name in stored:
            tensors[name] = torch.empty(stored[name][1], dtype=stored[name][0])
    wanted = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    filled = [n for n, t in tensors.items() if t.numel()]
    in_order = [t.name for t in file.tensors if t.nbytes] == filled
    if stored != wanted or not in_order or file.metadata.get("unit") != unit.unit.name:
        raise ValueError(f"{path.name} is not the state of {unit.unit.name} of this model")
    size = path.stat().st_size
    start = min((t.offset for t in file.tensors), default=size)

    def move(block: Tensor, at: int) -> None:
        try:
            read_into(block, fd=fd, offset=at)
        except ModelError as error:
            raise ValueError(error.message) from error
        forget(fd=fd, offset=at, nbytes=block.numel())

    fd = os.open(path, os.O_RDONLY)
    try:
        sums = _each_piece(tensors, header=os.pread(fd, start, 0), move=move)
    finally:
        os.close(fd)
    unit.version = int(file.metadata["version"])
    return FileRecord(size, sums.all, sums.weights)


def _header(path: Path) -> TensorFile:
    try:
        file = read_header(path)
    except ModelError as error:
        raise ValueError(error.message) from error
    if not file.metadata.get("version", "").isdecimal():
        raise ValueError(f"{path.name} does not state its version")
    return file


def _tensors(unit: HostUnit) -> dict[str, Tensor]:
    """In file order: wide dtypes first."""
    return {
        "steps": unit.steps,
        "exp_avg": unit.exp_avg,
        "exp_avg_sq": unit.exp_avg_sq,
        "lo": unit.lo,
        "hi": unit.hi,
    }


@dataclass(frozen=True)
class _Sums:
    all: str
    weights: str


def _each_piece(tensors: dict[str, Tensor], *, header: bytes, move: Callable[[Tensor, int], None]) -> _Sums:
    """Move every piece between memory and its place in the file, in threads."""

    def job(block: Tensor, at: int) -> bytes:
        move(block, at)
        return hashlib.sha256(memoryview(block.numpy())).digest()  # type: ignore[arg-type]

    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0))), thread_name_prefix="state") as pool:
        jobs, offset = [], len(header)
        for name, tensor in tensors.items():
            flat = as_bytes(tensor)
            for start in range(0, flat.numel(), HASHED_BYTES):
                jobs.append((name, pool.submit(job, flat[start : start + HASHED_BYTES], offset + start)))
            offset += flat.numel()
        whole, weights = hashlib.sha256(hashlib.sha256(header).digest()), hashlib.sha256()
        for name, done in jobs:
            whole.update(done.result())
            if name in _MASTERS:
                weights.update(done.result())
    return _Sums(whole.hexdigest(), weights.hexdigest())
