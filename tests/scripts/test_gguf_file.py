"""The GGUF reader of fetch_smollm2.py, on files written here byte by byte."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from gguf_file import GgufFile

F32, Q4_1, Q8_0 = 0, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(
    *, fields: dict[str, bytes], tensors: dict[str, tuple[tuple[int, ...], int, bytes]], version: int = 3
) -> bytes:
    """A file of ready-made fields (type and value) and tensors."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    head += b"".join(text(name) + value for name, value in fields.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(content: bytes) -> GgufFile:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return GgufFile(path)

    return write


def test_fields_of_every_kind(write) -> None:  # type: ignore[no-untyped-def]
    words = struct.pack("<IIQ", 9, 8, 2) + text("Ġt") + text("")
    file = write(
        gguf(
            fields={
                "name": struct.pack("<I", 8) + text("smollm"),
                "layers": struct.pack("<II", 4, 30),
                "eps": struct.pack("<If", 6, 0.5),
                "flag": struct.pack("<I?", 7, True),
                "words": words,
                "kinds": struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3),
            },
            tensors={},
        )
    )
    assert file.fields == {
        "name": "smollm",
        "layers": 30,
        "eps": 0.5,
        "flag": True,
        "words": ["Ġt", ""],
        "kinds": [1, -2, 3],
    }


def test_tensors_are_dequantised_in_place_and_shape(write) -> None:  # type: ignore[no-untyped-def]
    plain = np.arange(6, dtype=np.float32)
    eight = np.arange(-16, 16, dtype=np.int8)
    low, high = np.arange(16, dtype=np.uint8), np.arange(15, -1, -1, dtype=np.uint8)
    half = struct.Struct("<e")
    file = write(
        gguf(
            fields={"general.architecture": struct.pack("<I", 8) + text("llama")},
            tensors={
                "plain": ((2, 3), F32, plain.tobytes()),
                "eight": ((2, 32), Q8_0, (half.pack(0.5) + eight.tobytes()) * 2),
                "four": ((1, 32), Q4_1, half.pack(2.0) + half.pack(-1.0) + (low | (high << 4)).tobytes()),
            },
        )
    )
    by_name = {tensor.name: file.array(tensor) for tensor in file.tensors}
    np.testing.assert_array_equal(by_name["plain"], plain.reshape(2, 3))
    np.testing.assert_array_equal(by_name["eight"], np.stack([eight * np.float32(0.5)] * 2))
    np.testing.assert_array_equal(by_name["four"][0], 2.0 * np.concatenate([low, high]) - 1.0)


def test_what_is_not_read_is_refused(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="is not a GGUF file"):
        write(b"GGML" + bytes(60))
    with pytest.raises(ValueError, match="version 1"):
        write(gguf(fields={}, tensors={}, version=1))
    file = write(gguf(fields={}, tensors={"six": ((32,), 14, bytes(210))}))
    with pytest.raises(ValueError, match="six has GGML type 14"):
        file.array(file.tensors[0])
