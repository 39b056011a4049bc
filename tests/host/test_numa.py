"""Which memory nodes are taken in turn, from trees as Linux shows them, and that the kernel understands the request."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatrain.host import arena as arena_module
from megatrain.host import numa
from megatrain.host.arena import Arena
from megatrain.host.numa import interleave, memory_nodes, spread


def tree(folder: Path, cpus: dict[int, str], *, memory: str, allowed: str) -> dict[str, Path]:
    """A machine: the CPUs of each node, the nodes with memory, and those that the process may use."""
    sysfs, status = folder / "node", folder / "status"
    for node, listed in cpus.items():
        (sysfs / f"node{node}").mkdir(parents=True)
        (sysfs / f"node{node}" / "cpulist").write_text(f"{listed}\n")
    (sysfs / "has_memory").write_text(f"{memory}\n")
    status.write_text(f"Name:\tpython\nMems_allowed:\t00000003\nMems_allowed_list:\t{allowed}\n")
    return {"sysfs": sysfs, "status": status}


def test_two_sockets(tmp_path: Path) -> None:
    there = tree(tmp_path, {0: "0-15,32-47", 1: "16-31,48-63"}, memory="0-1", allowed="0-1")
    assert memory_nodes(cpus=set(range(64)), **there) == (0, 1)
    assert memory_nodes(cpus={3, 31}, **there) == (0, 1)


def test_a_process_on_one_socket_stays_there(tmp_path: Path) -> None:
    there = tree(tmp_path, {0: "0-15,32-47", 1: "16-31,48-63"}, memory="0-1", allowed="0-1")
    assert memory_nodes(cpus={16, 17, 48}, **there) == (1,)


def test_a_cpuset_forbids_a_node(tmp_path: Path) -> None:
    there = tree(tmp_path, {0: "0-3", 1: "4-7", 2: "8-11"}, memory="0-2", allowed="0,2")
    assert memory_nodes(cpus=set(range(12)), **there) == (0, 2)


def test_memory_of_a_gpu_and_nodes_without_memory_do_not_count(tmp_path: Path) -> None:
    """A coherent GPU's memory is a node without CPUs, as is a memory expander; some nodes have CPUs alone."""
    there = tree(tmp_path, {0: "0-71", 1: "72-143", 2: "", 10: "", 11: "144-150"}, memory="0-2,10", allowed="0-11")
    assert memory_nodes(cpus=set(range(200)), **there) == (0, 1)


def test_without_the_tree_there_are_no_nodes(tmp_path: Path) -> None:
    assert memory_nodes(cpus={0}, sysfs=tmp_path / "none", status=tmp_path / "none") == ()


def test_this_machine_has_a_node_that_is_its_own() -> None:
    if not numa.NODES.is_dir():
        pytest.skip("no NUMA tree here")
    assert memory_nodes(cpus=os.sched_getaffinity(0))


def nodes_are(monkeypatch: pytest.MonkeyPatch, *nodes: int) -> None:
    monkeypatch.setattr(numa, "memory_nodes", lambda cpus: nodes)


def test_one_node_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(address: int, nbytes: int, nodes: Sequence[int]) -> None:
        raise AssertionError

    nodes_are(monkeypatch, 1)
    assert spread(np.zeros(4096, dtype=np.uint8), bind=never) == ()


def test_a_refusal_is_no_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(address: int, nbytes: int, nodes: Sequence[int]) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    nodes_are(monkeypatch, 0, 1)
    with caplog.at_level(logging.INFO):
        assert spread(np.zeros(4096, dtype=np.uint8), bind=refused) == ()
    assert "nodes [0, 1]: [Errno 1] Operation not permitted" in caplog.text


def test_the_arena_is_bound_whole_and_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    touch = arena_module._populate

    def bound(address: int, nbytes: int, nodes: Sequence[int]) -> None:
        seen.append(f"bound {nbytes >= 1 << 20} {address % mmap.PAGESIZE} {nodes}")

    def touched(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], *, threads: int) -> None:
        seen.append("touched")
        touch(memory, threads=threads)

    nodes_are(monkeypatch, 0, 1)
    monkeypatch.setattr(numa, "interleave", bound)
    monkeypatch.setattr(arena_module, "_populate", touched)
    block = Arena(pinned_bytes=0, pageable_bytes=1 << 20, threads=1, pin=False).take(1 << 20, pinned=False)
    assert seen == ["bound True 0 (0, 1)", "touched"]
    assert not block.any()


def test_the_kernel_understands_the_request() -> None:
    """On this machine's own nodes; how the kernel lays the range out is what it says itself."""
    nodes = memory_nodes(cpus=os.sched_getaffinity(0))
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    maps = Path("/proc/self/numa_maps")
    if not nodes or not maps.is_file():
        pytest.skip("no NUMA here")
    try:
        interleave(memory.ctypes.data, len(memory), nodes)
    except PermissionError:
        pytest.skip("this container forbids mbind")
    lines = [line.split() for line in maps.read_text().splitlines()]
    policies = [line[1] for line in lines if line[0] == f"{memory.ctypes.data:x}"]
    assert policies
    assert policies[0].startswith("interleave:")
    with pytest.raises(OSError, match="Invalid argument"):
        interleave(memory.ctypes.data, len(memory), [700])  # a node that is not there
