"""``megatrain estimate-memory``: from config.json alone, exact sums, exit codes, and no torch where sizes are known."""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import estimate_command
from megatrain.errors import ModelError, UsageError
from megatrain.model.user_cache import cache_folder
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.disk import SPARE_BYTES
from megatrain.recipe import load_recipe, shipped_recipes
from megatrain.train import machine
from megatrain.train.examination import Examination, keep_examination
from megatrain.train.gpus import GpuFacts
from megatrain.train.model_config import read_config
from megatrain.train.planning import plan_run
from megatrain.train.structure import collector_paused
from megatrain.units import parse_size

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
RECIPES = Path(__file__).parents[2] / "recipes"
PARTS = ("host", "device", "disk")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def run(model: Path | None, *overrides: str, **options: Any) -> int:
    given: dict[str, Any] = {"model": None if model is None else str(model), "overrides": overrides, "json": True}
    given |= {"gpu": None, "vram": None, "host": None, "link": None, "cores": None, "largest": False}
    return estimate_command.run(options.pop("recipe", None), **given | options)


def estimated(capsys: pytest.CaptureFixture[str], model: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    code = run(model, *overrides, **options)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["exit_code"] == code
    assert isinstance(found, dict)
    return found


def test_everything_that_the_contract_names_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, folder)
    assert {"params", *PARTS, "limits", "fits", "advice", "speed"} <= set(found)
    outer, layer = 256 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    total = 2 * outer + 3 * layer + 64
    assert found["params"] == {"total": total, "trainable": total, "active": total}
    for part in PARTS:
        purposes = {k: v for k, v in found[part].items() if k != "total_bytes"}
        assert found[part]["total_bytes"] == sum(purposes.values())
        assert all(type(v) is int for v in purposes.values())
    assert set(found["limits"]) == {"host_bytes", "host_source", "vram_bytes", "vram_source", "disk_bytes"}
    assert found["fits"] is True
    assert found["exit_code"] == 0
    assert found["speed"]["tokens_per_s"] > 0
    assert found["speed"]["bound_by"] in ("compute", "optimizer", "link")
    assert found["disk"]["exported model"] == 4 * total  # the source is fp32


def test_it_is_the_plan_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["memory.device=cpu", "train.batch_size=6", "data.max_seq_len=64", "memory.micro_batch=2"]
    found = estimated(capsys, folder, *settings)
    recipe = load_recipe("quickstart", overrides=[*settings, f"model.path={folder}", "data.packing=true"])
    planned = plan_run(recipe, config=read_config(recipe)).plan
    device = found["device"]
    assert device.pop("total_bytes") == planned.device_total
    assert device == planned.device
    differ = {"this process so far", "libraries and compiler"}  # that process is another one
    assert {k: v for k, v in found["host"].items() if k in planned.host and k not in differ} == {
        k: v for k, v in planned.host.items() if k not in differ
    }


def test_a_gpu_that_is_not_here_is_planned_for_in_bf16(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, folder, vram="24GiB", host="64GiB", link="25GB/s", cores=16)
    total = found["params"]["total"]
    assert found["limits"]["vram_bytes"] == 24 << 30
    assert found["limits"]["vram_source"] == "--vram"
    assert found["limits"]["host_bytes"] == 64 << 30
    assert found["limits"]["host_source"] == "--host"
    assert 0 <= found["host"]["weights as streamed"] - 2 * total < 5 * 4096
    assert found["device"]["context and workspaces"] > 0
    assert "attention masks" not in found["device"]
    assert found["plan"]["threads"] == 14
    assert found["plan"]["resident"] == 5
    assert any("25 GB/s" in line for line in found["assumed"])
    in_fp32 = estimated(capsys, folder, "train.precision=fp32", vram="24GiB", host="64GiB")
    assert in_fp32["host"]["weights as streamed"] >= 4 * total


def test_the_cores_are_those_of_the_machine_that_is_planned_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of another machine: a stated number of cores, or an assumed one, never that of the machine one asks on."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    monkeypatch.setattr(machine, "optimizer_threads", lambda stated: stated or 3)
    for described, threads, words in (
        ({"host": "64GiB"}, 14, "16 cores, 14 of them update weights: --host is another machine's memory"),
        ({"host": "64GiB", "cores": 8}, 6, "8 cores (--cores), 6 of them"),
        ({"vram": "24GiB"}, 3, "the 3 cores that this process may use here, 3 of them"),
        ({}, 3, "the 3 cores that this process may use here"),
    ):
        found = estimated(capsys, folder, **described)
        assert found["plan"]["threads"] == threads
        assert sum(words in line for line in found["assumed"]) == 1
    assert estimated(capsys, folder, "memory.threads=5", host="64GiB")["plan"]["threads"] == 5


def test_everything_that_a_plan_decides_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, folder, vram="24GiB", host="64GiB")["plan"]
    tables = {"host", "device", "host_limit", "device_limit"}
    assert set(found) == {field.name for field in fields(MemoryPlan)} - tables
    assert (found["head_slices"], found["embedding_rows"]) == (0, 0)


def test_slices_of_the_head_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, SHAPES / "qwen2.5-7b", vram="10GiB", host="256GiB")
    assert found["plan"]["head_slices"] > 1
    assert found["plan"]["embedding_rows"] == 32 * 2048 + 1
    assert any(f"the head comes in {found['plan']['head_slices']} slices" in line for line in found["explanation"])


def test_what_does_not_fit_is_a_result_with_advice_and_exit_code_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimated(capsys, folder, vram="24GiB", host="2GiB")
    assert found["fits"] is False
    assert found["exit_code"] == 3
    assert "host memory of" in found["advice"][0]
    assert any("a machine with" in line and "enough" in line for line in found["advice"])
    tight = estimated(capsys, folder, "train.batch_size=4096", vram="1GiB", host="64GiB")
    assert tight["exit_code"] == 3
    assert any("train.batch_size 4096 -> " in line for line in tight["advice"])


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


def test_the_largest_that_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(capsys, folder, vram="24GiB", host="64GiB", largest=True)["max"]
    assert found["batch_size"] > found["micro_batch"] > 1
    assert found["max_seq_len"] > 2048
    assert found["model_params"] > 1e8
    assert set(found["how"]) == {"micro_batch", "batch_size", "max_seq_len", "model"}


def test_a_table_for_people_has_a_bar_and_no_escape_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, vram="24GiB", host="64GiB", json=False, largest=True) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for part in ("host memory: ", "device: ", "disk: ", "of 64.0 GiB (--host)", "█", "decided: ", "assumed: "):
        assert part in text
    assert "the largest that fits" in text


def test_where_nothing_fits_the_largest_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, vram="24GiB", host="1GiB", json=False, largest=True) == 3
    text = capsys.readouterr().out
    for title in ("micro-batch", "batch", "context", "model"):
        assert f"  {title} none: not even the least fits\n" in text


# --- the cache -------------------------------------------------------------------------------------------------


def test_known_sizes_need_no_torch(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = estimated(capsys, folder)
    code = (
        "import sys\nfrom megatrain.cli.main import main\n"
        "try:\n    main(['estimate-memory', '--model', sys.argv[1], '--json'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, cwd=tmp_path, timeout=120)
    assert done.stderr.splitlines()[-1] == "0 False False"
    assert json.loads(done.stdout)["device"] == before["device"]


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen2.5-7b"])
def test_known_sizes_give_the_same_answer(
    shape: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda path: 1 << 40)  # others write on the disk meanwhile
    described = {"vram": "24GiB", "host": "128GiB", "cores": 16}
    read = estimated(capsys, SHAPES / shape, **described)
    assert len(list((cache_folder() / "sizes").iterdir())) == 1
    assert estimated(capsys, SHAPES / shape, **described) == read


def test_the_collector_works_again_after_a_structure_was_read() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "damage", ["", "{", "[1]", '{"sizes": {}}', '{"sizes": {"layers": [], "stem": {}, "tail": {}}}']
)
def test_a_damaged_cache_is_read_anew(folder: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    before = estimated(capsys, folder)
    (kept,) = (cache_folder() / "sizes").iterdir()
    whole = kept.read_text()
    kept.write_text(damage)
    assert estimated(capsys, folder)["device"] == before["device"]
    assert kept.read_text() == whole
    values = json.loads(whole)
    values["sizes"]["stem"]["elems"] = "many"
    kept.write_text(json.dumps(values))
    assert estimated(capsys, folder)["device"] == before["device"]


def test_another_config_override_or_precision_is_another_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = estimated(capsys, folder)
    wider = estimated(capsys, folder, "model.config={num_hidden_layers: 5}")
    assert wider["params"]["total"] > first["params"]["total"]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    assert estimated(capsys, folder)["params"]["total"] > wider["params"]["total"]
    assert len(list((cache_folder() / "sizes").iterdir())) == 3


def test_a_cache_that_cannot_be_written_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert estimated(capsys, folder)["fits"] is True


# --- wrong calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"vram": "24"}, None),
        ({"vram": "24Gi"}, "--vram"),
        ({"host": "much"}, "--host"),
        ({"link": "25GB/h"}, "--link"),
        ({"host": "0"}, "--host"),
    ],
)
def test_sizes_and_rates_are_checked(folder: Path, options: dict[str, str], where: str | None) -> None:
    if where is None:
        assert run(folder, **options) == 3  # 24 bytes: a size, if a small one
        return
    with pytest.raises(UsageError) as caught:
        run(folder, **options)
    assert caught.value.where == where
    assert caught.value.exit_code == 2


def test_a_recipe_or_a_model_not_both_nor_none(folder: Path) -> None:
    with pytest.raises(UsageError, match="RECIPE or --model"):
        run(folder, recipe="quickstart")
    with pytest.raises(UsageError, match="RECIPE or --model"):
        run(None)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_cannot_be_read_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        run(folder)


def test_a_recipe_whose_data_do_not_exist_is_estimated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {folder}}}\ndata: {{train: /nowhere/at-all.jsonl, max_seq_len: 128}}\n"
        "output: {dir: /nowhere/runs}\n"
    )
    assert run(None, recipe=str(recipe)) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["seq_len"] == 128
