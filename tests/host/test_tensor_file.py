"""Files that lie: each is refused with one message that names the file and the lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatrain.errors import ModelError
from megatrain.host import source
from megatrain.host.source import fetch, locate
from megatrain.host.tensor_file import MAX_HEADER_BYTES, Slot, created, header_bytes, read_header, write_from
from megatrain.model import hub


def written(folder: Path, header: Any, *, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(begin: int, end: int, *, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "not-json": ({"header": b"{'a'"}, "not JSON"),
    "not-utf8": ({"header": b'{"\xff": 1}'}, "not JSON"),
    "a-list": ({"header": [1]}, "not a JSON object"),
    "deep": ({"header": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"}, "not JSON"),
    "long-number": ({"header": b'{"a":' + b"9" * 5000 + b"}"}, "not JSON"),
    "too-long": ({"header": {}, "length": MAX_HEADER_BYTES + 1}, "longer than the format allows"),
    "huge": ({"header": {}, "length": 2**64 - 1}, "longer than the format allows"),
    "longer-than-file": ({"header": {}, "length": 4000}, "the file ends after"),
    "twice": ({"header": b'{"a":%s,"a":%s}' % ((b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}',) * 2)}, "a is in"),
    "metadata": ({"header": {"__metadata__": {"a": 1}}}, "__metadata__"),
    "no-dtype": ({"header": {"a": {"shape": [1], "data_offsets": [0, 4]}}, "data": bytes(4)}, "a: needs exactly"),
    "more-keys": ({"header": {"a": tensor(0, 4) | {"x": 1}}, "data": bytes(4)}, "a: needs exactly"),
    "dtype": ({"header": {"a": tensor(0, 4, dtype="Q4")}, "data": bytes(4)}, "a: unknown dtype 'Q4'"),
    "dtype-list": ({"header": {"a": tensor(0, 4, dtype=["F32"])}, "data": bytes(4)}, "a: unknown dtype"),
    "negative": ({"header": {"a": tensor(0, 4, shape=(-1,))}, "data": bytes(4)}, "a: the shape"),
    "fraction": ({"header": {"a": tensor(0, 4, shape=(1.0,))}, "data": bytes(4)}, "a: the shape"),
    "truth": ({"header": {"a": tensor(0, 4, shape=(True,))}, "data": bytes(4)}, "a: the shape"),
    "no-list": ({"header": {"a": tensor(0, 4, shape="1")}, "data": bytes(4)}, "a: the shape"),
    "huge-count": ({"header": {"a": tensor(0, 4, shape=(2**61, 2**61))}, "data": bytes(4)}, "data_offsets span 4"),
    "wrap-around": ({"header": {"a": tensor(0, 0, shape=(2**32, 2**32))}}, "data_offsets span 0"),
    "too-few-bytes": ({"header": {"a": tensor(0, 4, shape=(2,))}, "data": bytes(4)}, "need 8 bytes"),
    "backwards": ({"header": {"a": tensor(4, 0)}, "data": bytes(4)}, "a: data_offsets"),
    "three": ({"header": {"a": tensor(0, 4) | {"data_offsets": [0, 4, 8]}}, "data": bytes(4)}, "a: data_offsets"),
    "beyond": ({"header": {"a": tensor(0, 400, shape=(100,))}, "data": bytes(4)}, "396 bytes behind the end"),
    "overlap": ({"header": {"a": tensor(0, 8, shape=(2,)), "b": tensor(4, 8)}, "data": bytes(8)}, "b: overlaps a"),
    "same-place": ({"header": {"a": tensor(0, 4), "b": tensor(0, 4)}, "data": bytes(4)}, "b: overlaps a"),
    "hole": ({"header": {"a": tensor(0, 4), "b": tensor(8, 12)}, "data": bytes(12)}, "b: leaves a hole of 4 bytes"),
    "hole-first": ({"header": {"a": tensor(4, 8)}, "data": bytes(8)}, "a: leaves a hole of 4 bytes after the header"),
    "trailing": ({"header": {"a": tensor(0, 4)}, "data": bytes(9)}, "5 bytes after the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name(lie: str, tmp_path: Path) -> None:
    arguments, message = LIES[lie]
    path = written(tmp_path, **arguments)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert message in caught.value.message
    assert caught.value.where == str(path)
    assert caught.value.hint


@pytest.mark.parametrize("size", [0, 7, 8, 100, 2000, -1])
def test_a_file_cut_off_anywhere_is_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(100, 10), "b": torch.randn(7)}, path)
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(ModelError, match="damaged safetensors file"):
        read_header(path)


def test_git_lfs_pointer_and_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        read_header(path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_header_or_a_model_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for whole in (content, len(content).to_bytes(8, "little") + content):
        path.write_bytes(whole)
        try:
            found = read_header(path).tensors
        except ModelError:
            continue
        assert sum(t.nbytes for t in found) <= len(whole)


def test_files_are_the_formats_own(tmp_path: Path) -> None:
    """What safetensors writes is read, and what is written safetensors reads."""
    tensors = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "b": torch.arange(7).bfloat16(),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    file = read_header(tmp_path / "theirs.safetensors")
    assert {t.name: (t.dtype, t.shape) for t in file.tensors} == {
        n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()
    }
    assert file.metadata == {"format": "pt"}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header = header_bytes([Slot(n, t.dtype, tuple(t.shape)) for n, t in ordered], metadata={"format": "pt"})
    with created(tmp_path / "ours.safetensors") as fd:
        write_from(torch.frombuffer(bytearray(header), dtype=torch.uint8), fd=fd, offset=0)
        offset = len(header)
        for _, t in ordered:
            write_from(t, fd=fd, offset=offset)
            offset += t.nbytes
    ours = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(ours[n], t) and ours[n].dtype is t.dtype for n, t in tensors.items())


def sharded(folder: Path, weight_map: Any) -> None:
    save_file({"a": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "model-2.safetensors")
    text = weight_map if isinstance(weight_map, str) else json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


GOOD_MAP = {"a": "model-1.safetensors", "b": "model-2.safetensors"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (GOOD_MAP | {"c": "model-3.safetensors"}, "model-3.safetensors, which is not there"),
        (GOOD_MAP | {"c": "model-2.safetensors"}, "c is in model-2.safetensors; it is not"),
        (GOOD_MAP | {"b": "model-1.safetensors"}, "b is in model-1.safetensors; it is not"),
        (GOOD_MAP | {"b": "../model-2.safetensors"}, "not the name of a safetensors file"),
        (GOOD_MAP | {"b": "/etc/passwd"}, "not the name of a safetensors file"),
        (GOOD_MAP | {"b": 3}, "not the name of a safetensors file"),
        ({}, "not a mapping"),
        ([1], "not a mapping"),
        ("[]", "no weight_map"),
        ("{", "no weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    sharded(tmp_path, weight_map)
    with pytest.raises(ModelError) as caught:
        locate(tmp_path)
    assert message in caught.value.message
    assert str(tmp_path) in str(caught.value.where)


def test_shards_are_found_and_a_tensor_in_two_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, GOOD_MAP)
    assert {n: t.path.name for n, t in locate(tmp_path).tensors.items()} == GOOD_MAP
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"a is in model-1.safetensors too"):
        locate(tmp_path)


def test_other_formats_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        locate(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model.bin") as caught:
        locate(tmp_path)
    assert "save_pretrained" in str(caught.value.hint)


def test_fetch_takes_a_folder_as_it_is(tmp_path: Path) -> None:
    assert fetch(str(tmp_path)) == tmp_path
    for path in (str(tmp_path / "none"), "./none", "a/b/c", str(Path(__file__))):
        with pytest.raises(ModelError, match="not a folder and not a hub id"):
            fetch(path)


def test_fetch_prefers_the_cache_and_completes_a_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def snapshot(path: str, *, local_files_only: bool = False, **_: Any) -> str:
        calls.append(local_files_only)
        if not local_files_only:
            save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", snapshot)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    assert fetch("org/name", revision="main") == tmp_path  # the cache has no weights yet
    assert fetch("org/name", revision="main") == tmp_path
    assert calls == [True, False, True]


def test_no_hub_is_a_model_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(path: str, **_: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(source, "snapshot_download", offline)
    monkeypatch.setattr(hub, "reachable", lambda: True)
    with pytest.raises(ModelError, match="the hub could not be reached") as caught:
        fetch("org/name")
    assert "model.path" in str(caught.value.hint)
