"""``megatrain estimate-memory``: from config.json alone, exact sums, exit codes, wrong calls."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from estimating import PARTS, SHAPES, estimated, run

from megatrain.errors import ModelError, UsageError
from megatrain.plan.accounting import MemoryPlan
from megatrain.recipe import load_recipe
from megatrain.train import machine
from megatrain.train.model_config import read_config
from megatrain.train.planning import plan_run


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
