from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.optim.threads import cgroup_quota, optimizer_threads, usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_tightest_quota_up_the_tree_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    write(proc, "0::/job/step")
    write(root / "job/step/cpu.max", "max 100000")
    write(root / "job/cpu.max", "350000 100000")
    write(root / "cpu.max", "800000 100000")
    assert cgroup_quota(proc=proc, root=root) == 3.5


def test_version_one(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    write(proc, "5:memory:/box\n4:cpu,cpuacct:/box")
    write(root / "cpu,cpuacct/box/cpu.cfs_quota_us", "150000")
    write(root / "cpu,cpuacct/box/cpu.cfs_period_us", "100000")
    write(root / "cpu,cpuacct/cpu.cfs_quota_us", "-1")
    write(root / "cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert cgroup_quota(proc=proc, root=root) == 1.5


def test_a_container_that_sees_its_hosts_path_reads_the_root(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    write(proc, "0::/system.slice/docker-1234.scope")
    write(root / "cpu.max", "200000 100000")
    assert cgroup_quota(proc=proc, root=root) == 2.0


@pytest.mark.parametrize("quota", ["max 100000", "20000000 100000"])
def test_affinity_is_the_upper_bound(tmp_path: Path, quota: str) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    write(proc, "0::/")
    write(root / "cpu.max", quota)
    assert usable_cores(proc=proc, root=root) == len(os.sched_getaffinity(0))


def test_less_than_a_core_is_one(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    write(proc, "0::/")
    write(root / "cpu.max", "50000 100000")
    assert usable_cores(proc=proc, root=root) == 1


def test_no_cgroups(tmp_path: Path) -> None:
    assert cgroup_quota(proc=tmp_path / "none", root=tmp_path) is None


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (4, 4), (5, 3), (16, 14)])
def test_two_cores_are_left_free_where_there_are_more_than_four(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("megatrain.optim.threads.usable_cores", lambda: cores)
    assert optimizer_threads() == threads
    assert optimizer_threads(7) == 7
