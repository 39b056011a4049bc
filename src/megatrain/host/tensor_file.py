"""safetensors files: a strict reader of headers, and reading and writing pieces straight from and to memory.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors one after another.
Nothing in a header is believed: lengths, shapes, dtypes, offsets, overlaps and holes are checked against each
other and the size of the file before a byte of a tensor is read. Format: github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import ModelError

PIECE_BYTES = 4 << 20
"""Read, checked and converted at a time, while it is in the cache."""
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: where its bytes are and what they mean."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int  # from the start of the file
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        """Elements of one index of the first dimension (1 for a scalar)."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class TensorFile:
    """A checked header."""

    path: Path
    tensors: tuple[StoredTensor, ...]  # in file order
    metadata: dict[str, str]


def read_header(path: Path) -> TensorFile:
    """Parse and check a file's header. Raises ModelError naming the file and the first thing that is wrong."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length_bytes = file.read(8)
            length = _header_length(path, length_bytes, size=size)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
    header = _parse(path, raw)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "__metadata__ is not a mapping of strings")
    start = 8 + length
    tensors = sorted((_entry(path, n, e, start=start) for n, e in header.items()), key=lambda t: (t.offset, t.nbytes))
    _check_cover(path, tensors, start=start, size=size)
    return TensorFile(path, tuple(tensors), metadata)


def _header_length(path: Path, raw: bytes, *, size: int) -> int:
    if raw == b"version ":
        raise ModelError(
            "is a Git LFS pointer, not the weights", where=str(path), hint="run: git lfs pull, or download the file"
        )
    if len(raw) < 8:
        raise _damaged(path, f"{size} bytes are too few for a header")
    length = int.from_bytes(raw, "little")
    if length > MAX_HEADER_BYTES:
        raise _damaged(path, f"a header of {length} bytes is longer than the format allows ({MAX_HEADER_BYTES})")
    if length > size - 8:
        raise _damaged(path, f"the header should have {length} bytes but the file ends after {size - 8}")
    return length


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in mapping if names.count(name) > 1)
            raise _damaged(path, f"{twice} is in the header twice")
        return mapping

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "the header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not a JSON object")
    return header


def _entry(path: Path, name: str, entry: Any, *, start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{name}: needs exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _damaged(path, f"{name}: unknown dtype {entry['dtype']!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape):
        raise _damaged(path, f"{name}: the shape is not a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"{name}: data_offsets are not a begin and an end")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != offsets[1] - offsets[0]:
        raise _damaged(
            path, f"{name}: shape and dtype need {nbytes} bytes, data_offsets span {offsets[1] - offsets[0]}"
        )
    return StoredTensor(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _check_cover(path: Path, tensors: list[StoredTensor], *, start: int, size: int) -> None:
    """Tensors must lie one after another, from the header to the last byte."""
    end, before = start, "the header"
    for tensor in tensors:
        if tensor.offset + tensor.nbytes > size:
            missing = tensor.offset + tensor.nbytes - size
            raise _damaged(path, f"{tensor.name}: ends {missing} bytes behind the end of the file (cut off?)")
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else f"leaves a hole of {tensor.offset - end} bytes after"
            raise _damaged(path, f"{tensor.name}: {what} {before}")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    if end != size:
        raise _damaged(path, f"{size - end} bytes after the last tensor belong to none")


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(
        f"damaged safetensors file: {what}", where=str(path), hint="download or copy the file again and compare sizes"
    )


@contextmanager
def opened(paths: Iterable[Path]) -> Iterator[dict[Path, int]]:
    """File descriptors to read the paths, closed at the end."""
    fds: dict[Path, int] = {}
    try:
        for path in paths:
            fds[path] = os.open(path, os.O_RDONLY)
        yield fds
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=error.filename) from error
    finally:
        for fd in fds.values():
            os.close(fd)


def read_into(block: Tensor, *, fd: int, offset: int) -> None:
    """Fill `block` (contiguous, on the CPU) from the file at `offset`. Raises ModelError when the file is too short."""
    view = _memory(block)
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise ModelError(f"the file ended at byte {offset + done} while it was read; did it change?")
        done += got


def forget(*, fd: int, offset: int, nbytes: int) -> None:
    """Tell the kernel that these bytes of a file are not needed again: its cache must not crowd out our memory."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_from(block: Tensor, *, fd: int, offset: int) -> None:
    """Write `block` (contiguous, on the CPU) to the file at `offset`."""
    view = _memory(block)
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done:]], offset + done)


def as_bytes(block: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: uint8 [nbytes], a view."""
    return block.reshape(-1).view(torch.uint8)


def _memory(block: Tensor) -> memoryview:
    array: Any = as_bytes(block).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class Slot:
    """A tensor that a new file will hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(slots: Iterable[Slot], *, metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file whose tensors follow in this order. Wide dtypes should come first (alignment)."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for slot in slots:
        begin, end = end, end + slot.nbytes
        header[slot.name] = {"dtype": NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes, as the format's own writer does
    return len(text).to_bytes(8, "little") + text


@contextmanager
def created(path: Path) -> Iterator[int]:
    """A new file to write, with the permissions of the umask, on the disk when the block ends. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)
