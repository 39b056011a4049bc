"""A GGUF file, read: its metadata, and its tensors as fp32 arrays.

Only what fetch_smollm2.py needs: version 2 and 3, little-endian, tensors of type F32, Q8_0 and Q4_1.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
BLOCK = 32  # values that share a scale in the quantised types
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCK_BYTES = {F32: 4 * BLOCK, Q4_1: 2 + 2 + BLOCK // 2, Q8_0: 2 + BLOCK}

Fp32Array = NDArray[np.float32]


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` has the slowest dimension first, as numpy and torch have it."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int  # byte in the file


class GgufFile:
    """Open for as long as the object lives; `array` copies out of the mapped file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        if self._map[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; 2 and 3 are read")
        tensors, fields = self._scalar("<Q"), self._scalar("<Q")
        self.fields = {self._string(): self._value(self._scalar("<I")) for _ in range(fields)}
        heads = [self._tensor_head() for _ in range(tensors)]
        alignment = self.fields.get("general.alignment", 32)
        data = -(-self._at // alignment) * alignment
        self.tensors = tuple(GgufTensor(name, shape, kind, data + offset) for name, shape, kind, offset in heads)

    def array(self, tensor: GgufTensor) -> Fp32Array:
        """The values of `tensor`, de-quantised. Raises ValueError for a type that is not read."""
        if tensor.type not in BLOCK_BYTES:
            raise ValueError(f"tensor {tensor.name} has GGML type {tensor.type}, which is not read")
        values = math.prod(tensor.shape)
        nbytes = -(-values // BLOCK) * BLOCK_BYTES[tensor.type] if tensor.type != F32 else 4 * values
        raw = np.frombuffer(self._map, dtype=np.uint8, count=nbytes, offset=tensor.start)
        return _DECODE[tensor.type](raw).reshape(tensor.shape)

    def _scalar(self, form: str):  # type: ignore[no-untyped-def]  # int, float or bool, as the form says
        (value,) = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._scalar("<Q")
        self._at += length
        return self._map[self._at - length : self._at].decode()

    def _value(self, kind: int):  # type: ignore[no-untyped-def]  # whatever the file says
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return list(self._items())
        return self._scalar(SCALARS[kind])

    def _items(self) -> Iterator[object]:
        kind, length = self._scalar("<I"), self._scalar("<Q")
        for _ in range(length):
            yield self._value(kind)

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._scalar("<I")
        fastest_first = [self._scalar("<Q") for _ in range(rank)]
        return name, tuple(reversed(fastest_first)), self._scalar("<I"), self._scalar("<Q")


def _f32(raw: NDArray[np.uint8]) -> Fp32Array:
    return raw.view(np.float32).copy()


def _q8_0(raw: NDArray[np.uint8]) -> Fp32Array:
    """Blocks of an fp16 scale and 32 signed bytes."""
    blocks = raw.reshape(-1, BLOCK_BYTES[Q8_0])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_1(raw: NDArray[np.uint8]) -> Fp32Array:
    """Blocks of an fp16 scale, an fp16 minimum and 16 bytes: low nibbles are values 0-15, high ones 16-31."""
    blocks = raw.reshape(-1, BLOCK_BYTES[Q4_1])
    scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * nibbles.astype(np.float32) + minimum


_DECODE = {F32: _f32, Q8_0: _q8_0, Q4_1: _q4_1}
