"""``megatrain estimate-memory`` for machines: ceilings, disks, GPUs that are not here, what recipes state."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
from estimating import RECIPES, SHAPES, estimated, run

from megatrain.errors import UsageError
from megatrain.plan.disk import SPARE_BYTES
from megatrain.recipe import load_recipe, shipped_recipes
from megatrain.train import machine
from megatrain.train.examination import Examination, keep_examination
from megatrain.train.gpus import GpuFacts
from megatrain.units import parse_size

LARGE = ("llama3-8b", "llama3-70b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-14b")
STATED = re.compile(r"about ([\d,]+ GB) \(([\d,]+ GiB)\) of host memory")


def test_every_recipe_that_fills_a_gpu_states_its_host_memory() -> None:
    assert {name for name in shipped_recipes() if load_recipe(name, overrides=[]).memory.vram != "auto"} == set(LARGE)


@pytest.mark.parametrize("recipe", LARGE)
def test_the_host_memory_that_a_recipe_states_is_what_it_needs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    stated = STATED.search((RECIPES / f"{recipe}.yaml").read_text())
    assert stated is not None
    vram = load_recipe(recipe, overrides=[]).memory.vram
    for said in stated.groups():
        size = parse_size(said.replace(",", ""))
        assert run(None, recipe=recipe, vram=str(vram), host=str(size)) == 0
        assert run(None, recipe=recipe, vram=str(vram), host=str(int(0.97 * size))) == 3
    capsys.readouterr()


@pytest.mark.parametrize(("recipe", "host"), [("llama3-8b", 109), ("qwen2.5-7b", 103)])
def test_the_machine_that_is_advised_is_the_least_that_is_enough(
    recipe: str, host: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def on(size: str) -> dict[str, Any]:
        run(None, recipe=recipe, vram="24GiB", host=size)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    found = on(f"{host}GiB")
    assert found["exit_code"] == 3
    assert found["host"]["total_bytes"] < (host + 1) << 30
    (advised,) = re.findall(r"a machine with (\S+)GiB of host memory: enough", "\n".join(found["advice"]))
    assert host < float(advised) <= host + 1
    assert on(f"{advised}GiB")["fits"] is True
    assert on(f"{0.98 * float(advised)}GiB")["fits"] is False


def test_the_smaller_of_two_ceilings_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, folder, "memory.vram=8GiB", vram="24GiB", host="64GiB")
    assert (found["limits"]["vram_bytes"], found["limits"]["vram_source"]) == (8 << 30, "memory.vram")


def test_disk_of_every_kept_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = estimated(capsys, folder)["disk"]
    often = estimated(capsys, folder, "train.save_every=10", "output.keep=3", "output.export=false")["disk"]
    assert "checkpoints kept" not in once
    assert often["checkpoints kept"] == 3 * once["checkpoint being written"]
    assert "exported model" not in often


def test_a_disk_without_room_for_a_checkpoint_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    often = ("train.save_every=10", "output.keep=3")
    disk = estimated(capsys, folder)["disk"]
    one, export = disk["checkpoint being written"], disk["exported model"]
    monkeypatch.setattr(machine, "disk_free", lambda path: 2 * one + SPARE_BYTES)
    assert 2 * one >= one + export
    some = estimated(capsys, folder, *often)
    assert some["fits"] is True
    assert any("lower output.keep" in line for line in some["advice"])
    monkeypatch.setattr(machine, "disk_free", lambda path: 2 * one + SPARE_BYTES - 1)
    none = estimated(capsys, folder, *often)
    assert (none["fits"], none["exit_code"]) == (False, 3)
    assert any("of disk are needed" in line for line in none["advice"])
    elsewhere = estimated(capsys, folder, *often, host="8GiB")
    assert elsewhere["fits"] is True
    monkeypatch.setattr(machine, "disk_free", lambda path: one + export + SPARE_BYTES)
    assert estimated(capsys, folder)["fits"] is True
    assert estimated(capsys, folder, "train.save_every=30 min")["fits"] is True
    monkeypatch.setattr(machine, "disk_free", lambda path: one + export + SPARE_BYTES - 1)
    assert estimated(capsys, folder)["exit_code"] == 3


@pytest.mark.parametrize(
    ("name", "known", "tflops"),
    [
        ("RTX 4090", "RTX 4090", 165),
        ("4090", "RTX 4090", 165),
        ("a6000", "RTX A6000", 155),
        ("NVIDIA GeForce RTX 3080", "RTX 3080", 60),
        ("RTX 3090", "RTX 3090", 71),
        ("RTX 4080", "RTX 4080", 98),
        ("RTX 5090", "RTX 5090", 210),
        ("L4", "L4", 121),
    ],
)
def test_a_named_gpu_is_as_fast_as_its_data_sheet_says(
    name: str, known: str, tflops: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "\n".join(estimated(capsys, folder, gpu=name, vram="24GiB", host="64GiB")["assumed"])
    assert f"{known} on which this process may take 24.0 GiB" in said
    assert f"70% of {tflops} TFLOP/s (data sheet)" in said
    assert "--gpu" not in said


def test_a_gpu_without_a_name_is_a_guess_and_a_faster_one_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    def rate(**gpu: str) -> float:
        found = estimated(capsys, SHAPES / "qwen2.5-7b", vram="24GiB", host="128GiB", **gpu)
        assert any("--gpu says which" in line for line in found["assumed"]) == (not gpu)
        return float(found["speed"]["tokens_per_s"])

    assert rate(gpu="RTX 3090") < rate() < rate(gpu="RTX 4090")


def test_what_doctor_measured_with_another_gpu_does_not_count(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = GpuFacts(0, "NVIDIA H200", "580.1", 141 << 30, 140 << 30, 5, 5, 16, 16)
    monkeypatch.setattr(machine, "read_gpu", lambda index: here)
    rates = {"copy_bytes_per_s": 9e10, "update_params_per_s": 3e9, "link_in_bytes_per_s": 55e9}
    both = {"link_out_bytes_per_s": 54e9, "link_duplex_bytes_per_s": 51e9}
    assert keep_examination(Examination(platform.node(), here.name, 14, "avx512", **rates, **both))
    assert any("measured by megatrain doctor" in line for line in estimated(capsys, folder)["assumed"])
    other = estimated(capsys, folder, gpu="RTX 4090", vram="24GiB")["assumed"]
    assert not any("measured by megatrain doctor" in line for line in other)
    assert any("link 25 GB/s (PCIe 4 x16 assumed)" in line for line in other)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"gpu": "RTX 9999", "vram": "24GiB"}, "RTX 9999", "RTX 4090"),
        ({"gpu": "RTX 4090 Laptop GPU", "vram": "16GiB"}, "Laptop", "RTX 4090"),
        ({"gpu": "RTX 4090"}, "how much of its memory", "--vram"),
    ],
)
def test_a_gpu_must_be_known_and_its_memory_given(
    options: dict[str, str], message: str, hint: str, folder: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run(folder, **options)
    assert (caught.value.where, caught.value.exit_code) == ("--gpu", 2)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


@pytest.mark.parametrize("described", [{"host": "8GiB"}, {"vram": "24GiB"}])
def test_the_disk_of_another_machine_is_not_this_ones(
    described: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda path: 1)
    found = estimated(capsys, folder, **described)
    assert found["limits"]["disk_bytes"] is None
    assert found["disk"]["total_bytes"] > 0
    assert found["fits"] is True
    assert any("whose disk is not known" in line for line in found["assumed"])
    run(folder, json=False, **described)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("disk: "))
    assert " of " not in line


def test_the_disk_of_this_machine_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert estimated(capsys, folder)["limits"]["disk_bytes"] > 0
    run(folder, json=False)
    text = capsys.readouterr().out
    assert "(free where output.dir is)" in text
    assert "whose disk is not known" not in text
