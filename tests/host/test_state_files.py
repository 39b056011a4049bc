from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from host.host_configs import FAMILIES
from host.host_tiny import anatomy_of, meta_model
from megatrain.host import state_files
from megatrain.host.state_files import read_unit, write_unit
from megatrain.host.store import HostStore, HostUnit

FIELDS = ("hi", "lo", "exp_avg", "exp_avg_sq", "steps")


def store_of(
    family: str = "gpt_oss",
    *,
    streamed: torch.dtype = torch.bfloat16,
    training: bool = True,
    moments: torch.dtype = torch.float32,
) -> HostStore:
    anatomy = anatomy_of(meta_model(FAMILIES[family](), dtype=streamed), streamed=streamed)
    return HostStore.allocate(anatomy, pin=False, threads=1, training=training, moments=moments)


def fill(unit: HostUnit, *, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in FIELDS:
        tensor = getattr(unit, name)
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    unit.steps.copy_(torch.arange(len(unit.steps)))
    unit.version = 7


def same(one: HostUnit, other: HostUnit) -> bool:
    return one.version == other.version and all(
        torch.equal(getattr(one, n).view(torch.uint8), getattr(other, n).view(torch.uint8)) for n in FIELDS
    )


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32 moments", "bf16 moments"])
@pytest.mark.parametrize("streamed", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_every_bit_comes_back(streamed: torch.dtype, moments: torch.dtype, tmp_path: Path) -> None:
    store, other = (store_of(streamed=streamed, moments=moments) for _ in range(2))
    for index, (unit, target) in enumerate(zip(store.units, other.units, strict=True)):
        fill(unit, seed=index)
        path = tmp_path / f"{index}.safetensors"
        written = write_unit(path, unit)
        assert written.bytes == path.stat().st_size
        assert read_unit(path, target) == written
        assert same(unit, target)
    plain = load_file(tmp_path / "1.safetensors")  # and any safetensors reader can open it
    assert set(plain) == set(FIELDS)
    assert torch.equal(plain["hi"], store.layers[0].hi)
    assert plain["exp_avg"].dtype is plain["exp_avg_sq"].dtype is moments


def test_the_checksum_sees_one_bit_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "HASHED_BYTES", 1000)
    store = store_of()
    unit = store.layers[0]
    fill(unit)
    path = tmp_path / "unit.safetensors"
    written = write_unit(path, unit)
    content = path.read_bytes()
    step = max(1, (len(content) - 4000) // 40)
    for at in range(4000, len(content), step):
        changed = bytearray(content)
        changed[at] ^= 1
        path.write_bytes(changed)
        assert read_unit(path, unit).checksum != written.checksum
    path.write_bytes(content)
    assert read_unit(path, unit) == written


def test_another_file_is_refused(tmp_path: Path) -> None:
    store = store_of()
    path = tmp_path / "unit.safetensors"
    write_unit(path, store.layers[0])
    with pytest.raises(ValueError, match="not the state of layer 1"):
        read_unit(path, store.layers[1])
    with pytest.raises(ValueError, match="not the state of layer 0"):
        read_unit(path, store_of(streamed=torch.float32).layers[0])
    with pytest.raises(ValueError, match="not the state of layer 0"):
        read_unit(path, store_of(moments=torch.bfloat16).layers[0])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        read_unit(path, store.layers[0])
    with pytest.raises(OSError, match="No such file"):
        write_unit(tmp_path / "none" / "unit.safetensors", store.layers[0])
    with pytest.raises((OSError, ValueError)):
        read_unit(tmp_path / "none.safetensors", store.layers[0])


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_can_be_read_without_room_for_moments(tmp_path: Path, moments: torch.dtype) -> None:
    store, slim = store_of(moments=moments), store_of(training=False)
    fill(store.stem)
    written = write_unit(tmp_path / "stem.safetensors", store.stem)
    assert read_unit(tmp_path / "stem.safetensors", slim.stem) == written
    assert torch.equal(slim.stem.hi, store.stem.hi)
    assert torch.equal(slim.stem.lo, store.stem.lo)
    assert slim.stem.exp_avg.numel() == 0
