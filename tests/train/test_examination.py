"""`doctor`: what is measured on the host, what it says is slow and why, and that its result is kept and used."""

from __future__ import annotations

import ctypes
import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import doctor_command
from megatrain.host.arena import Arena
from megatrain.model.user_cache import cache_folder
from megatrain.plan.hardware import Limit, read_host_memory
from megatrain.plan.rates import assumed_rates
from megatrain.train import doctor
from megatrain.train.examination import UPDATE_BYTES, Examination, find_examination, keep_examination
from megatrain.train.findings import Facts, findings, read_facts
from megatrain.train.gpus import GpuFacts, read_gpu

HEALTHY = Examination(
    host=platform.node(),
    gpu="NVIDIA H200",
    threads=14,
    isa="avx512",
    copy_bytes_per_s=130e9,
    update_params_per_s=5e9,
    link_in_bytes_per_s=55e9,
    link_out_bytes_per_s=54e9,
    link_duplex_bytes_per_s=51e9,
    pageable_in_bytes_per_s=8.6e9,
    page_lock_bytes=16 << 30,
)
CALM = Facts("Xeon", 16, 16, 1, 1, "madvise", "")
CARD = GpuFacts(0, "NVIDIA H200", "580.1", 141 << 30, 140 << 30, 5, 5, 16, 16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatrain"


def said(examination: Examination = HEALTHY, *, facts: Facts = CALM, gpu: GpuFacts | None = CARD) -> str:
    return "\n".join(findings(examination, facts=facts, gpu=gpu, page_lock=None))


def test_a_healthy_machine_has_no_findings() -> None:
    assert said() == ""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"isa": "torch"}, "the AdamW kernel is missing"),
        ({"isa": "scalar"}, "neither AVX2 nor AVX-512"),
        ({"update_params_per_s": 2e9, "isa": "avx2"}, "AVX-512 would help"),
        ({"page_lock_failure": "page-locking failed after 2.00 GiB: out of memory"}, "failed after 2.00 GiB"),
        ({"link_in_bytes_per_s": 20e9, "link_duplex_bytes_per_s": 19e9}, "20.0 GB/s of the link's 63"),
        ({"link_duplex_bytes_per_s": 27e9}, "27.0 GB/s each way, 55.0 alone"),
    ],
)
def test_what_is_slow_is_named(change: dict[str, Any], expected: str) -> None:
    assert expected in said(replace(HEALTHY, **change))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"numa_nodes": 2}, "1 of 2 NUMA nodes"),
        ({"cores_online": 64}, "16 of 64 cores"),
        ({"huge_pages": "never"}, "huge pages are off"),
    ],
)
def test_what_the_system_withholds_is_named(change: dict[str, Any], expected: str) -> None:
    assert expected in said(facts=replace(CALM, **change))


def test_omp_settings_matter_where_layers_run_on_the_cpu() -> None:
    narrow = replace(CALM, omp_num_threads="1")
    assert said(facts=narrow) == ""
    assert "OMP_NUM_THREADS=1" in said(replace(HEALTHY, gpu=None, link_in_bytes_per_s=None), facts=narrow, gpu=None)


def test_a_narrow_or_old_slot_is_named() -> None:
    slow = replace(HEALTHY, link_in_bytes_per_s=26e9, link_duplex_bytes_per_s=25e9)
    assert "8 of its 16 PCIe lanes" in said(slow, gpu=replace(CARD, link_width=8))
    third = replace(CARD, link_generation=3, link_generation_max=3)
    old = replace(HEALTHY, link_in_bytes_per_s=12e9, link_duplex_bytes_per_s=11e9)
    assert "a PCIe generation 3 link: 12.0 GB/s" in said(old, gpu=third)


def test_a_gpu_from_before_bf16_is_among_the_findings() -> None:
    old = replace(CARD, name="Tesla T4", capability=(7, 5))
    lines = findings(HEALTHY, facts=CALM, gpu=old, page_lock=None)
    assert [line for line in lines if line.startswith("Tesla T4 has compute capability 7.5, and bf16 begins with 8.0")]


def test_wsl2_is_among_the_findings() -> None:
    lines = findings(HEALTHY, facts=CALM, gpu=CARD, page_lock=Limit(16 << 30, "WSL2 page-locks half of its memory"))
    assert lines == ("WSL2 page-locks half of its memory: 16.0 GiB",)


def test_facts_are_read_from_the_system(tmp_path: Path) -> None:
    for path, text in {
        "proc/cpuinfo": "processor: 0\nmodel name\t: A CPU\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/node/node0/cpulist": "0-1023\n",
        "sys/devices/system/node/node1/cpulist": "1024-2047\n",
        "sys/devices/system/node/node2/cpulist": "\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    facts = read_facts(root=tmp_path, environ={"OMP_NUM_THREADS": "3"})
    assert (facts.cpu, facts.huge_pages, facts.omp_num_threads) == ("A CPU", "never", "3")
    assert (facts.numa_nodes, facts.numa_nodes_allowed) == (2, 1)  # the third has memory alone


# --- what is kept --------------------------------------------------------------------------------------------


def test_a_kept_examination_comes_back_for_this_host_and_gpu() -> None:
    assert find_examination("NVIDIA H200") is None
    assert keep_examination(HEALTHY)
    assert find_examination("NVIDIA H200") == HEALTHY
    assert find_examination(None) is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"host": 3}', "null"])
def test_a_damaged_examination_is_none(damage: str) -> None:
    keep_examination(HEALTHY)
    (kept,) = (cache_folder() / "doctor").iterdir()
    kept.write_text(damage)
    assert find_examination("NVIDIA H200") is None


def test_measured_rates_stand_in_for_assumed_ones() -> None:
    assumed = assumed_rates("NVIDIA H200", cores=14)
    better = replace(HEALTHY, update_params_per_s=4e9).improve(assumed)
    assert better.host_bytes == UPDATE_BYTES * 4e9
    assert (better.link_in_bytes, better.link_out_bytes, better.link_duplex_bytes) == (55e9, 54e9, 51e9)
    assert "measured by megatrain doctor" in better.source
    host_only = replace(HEALTHY, link_in_bytes_per_s=None).improve(assumed)
    assert host_only.link_in_bytes == assumed.link_in_bytes


# --- the command ---------------------------------------------------------------------------------------------


def test_a_gpu_that_is_full_is_no_bug_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def pageable(**sizes: Any) -> Arena:
        return Arena(**{**sizes, "pin": False})

    for name, stand_in in (("cuda_available", lambda: True), ("open_cuda", lambda _: None), ("Arena", pageable)):
        monkeypatch.setattr(doctor, name, stand_in)
    monkeypatch.setattr(doctor, "measure_link", full)
    found = doctor._measure_gpu(read_host_memory(), scale=0.001, threads=1)
    assert found.link is None
    assert "no room on the GPU" in str(found.trouble)


def test_on_a_machine_without_a_gpu_the_host_half_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "MEASURE_S", 0.001)
    monkeypatch.setattr(doctor, "ELEMENTS", 1 << 20)
    monkeypatch.setattr(doctor, "read_gpu", lambda index: None)
    monkeypatch.setattr(doctor, "COPY_BYTES", 1 << 20)
    assert doctor_command.run(json=True) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["gpu"] is None
    assert found["gpu_trouble"]
    assert found["kernel"]["params_per_s"] > 0
    assert found["kernel"]["isa"] in ("scalar", "avx2", "avx512", "torch")
    assert found["host"]["copy_bytes_per_s"] > 0
    assert found["limits"]["host_source"]
    assert find_examination(None) is not None
    assert doctor_command.run(json=False) == 0
    text = capsys.readouterr().out
    assert "only the host was examined" in text
    kept = find_examination(None)
    assert kept is not None
    moved = f"{UPDATE_BYTES * kept.update_params_per_s / 1e9:.1f} GB/s"
    assert f"it moves {moved}" in text
    assert f"AdamW moves {moved} of host memory" in kept.improve(assumed_rates(None, cores=2)).source


# --- the driver's library ------------------------------------------------------------------------------------


class FakeNvml:
    """Two GPUs behind the functions that are called, with ctypes' conventions."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken, self.open = broken, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 999 if self.broken else 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0 if index < 2 else 2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if uuid == b"GPU-two" else 2

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total, memory._obj.free = (handle.value or 0) << 30, 1 << 29
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = f"Fake {handle.value}".encode()
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.1"
        return 0

    def _four(self, handle: ctypes.c_void_p, number: Any) -> int:
        number._obj.value = 4
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 7, 5
        return 0

    nvmlDeviceGetCurrPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkGeneration = _four
    nvmlDeviceGetCurrPcieLinkWidth = nvmlDeviceGetMaxPcieLinkWidth = _four


@pytest.mark.parametrize(
    ("visible", "index", "name"),
    [
        (None, 0, "Fake 1"),
        (None, 1, "Fake 2"),
        (None, 2, None),
        ("1", 0, "Fake 2"),
        ("1", 1, None),
        ("GPU-two", 0, "Fake 2"),
        ("", 0, None),
        ("-1", 0, None),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, name: str | None
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = FakeNvml()
    found = read_gpu(index, nvml=lambda: library)
    assert (found and found.name) == name
    assert library.open == 0
    if found is not None:
        assert found.total_bytes == int(found.name.removeprefix("Fake ")) << 30
        assert (found.free_bytes, found.driver, found.link_width_max) == (1 << 29, "580.1", 4)
        assert found.capability == (7, 5)


def test_no_driver_or_a_broken_one_is_no_gpu() -> None:
    assert read_gpu(0, nvml=lambda: None) is None
    assert read_gpu(0, nvml=lambda: FakeNvml(broken=True)) is None
