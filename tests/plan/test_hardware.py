"""Limits are read from fake machines: a folder that holds proc/ and sys/ as a kernel would show them."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.plan.hardware import UNLIMITED, HostMemory, Limit, read_host_memory, read_page_lock

MIB = 1 << 20
GIB = 1 << 30
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"


def kib(size: int) -> str:
    return f"{size // 1024} kB"


class Machine:
    """A fake machine of 64 GiB, 60 of them available, in which this process holds 1 GiB."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rlimits: dict[int, int] = {}
        self.write(
            "proc/meminfo",
            f"MemTotal: {kib(64 * GIB)}\nMemFree: {kib(GIB)}\nMemAvailable:  {kib(60 * GIB)}\nHugePages_Total: 0\n",
        )
        self.write(
            "proc/self/status",
            f"Name:\tpython\nVmSize:\t{kib(4 * GIB)}\nVmData:\t{kib(2 * GIB)}\nVmRSS:\t{kib(GIB)}\n"
            f"RssAnon:\t{kib(768 * MIB)}\nRssFile:\t{kib(256 * MIB)}\nRssShmem:\t0 kB\nThreads:\t3\n",
        )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mounts(self, *lines: str) -> None:
        self.write("proc/self/mountinfo", "\n".join(["23 1 8:1 / / rw - ext4 /dev/sda1 rw", *lines]) + "\n")

    def v1(self, folder: str, limit: int, *, usage: int = 0, cache: int = 0) -> None:
        base = f"sys/fs/cgroup/memory{folder}"
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"cache 5\ntotal_inactive_file {cache}\ntotal_active_file 0\n")

    def v2(self, folder: str, limit: int | None, *, usage: int = 0, cache: int = 0, high: int | None = None) -> None:
        base = f"sys/fs/cgroup{folder}"
        self.write(f"{base}/memory.max", "max\n" if limit is None else f"{limit}\n")
        self.write(f"{base}/memory.high", "max\n" if high is None else f"{high}\n")
        self.write(f"{base}/memory.current", f"{usage}\n")
        self.write(f"{base}/memory.stat", f"anon 7\ninactive_file {cache}\nactive_file 0\n")

    def read(self) -> HostMemory:
        return read_host_memory(root=self.root, rlimit=lambda which: self.rlimits.get(which, UNLIMITED))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_plain_machine_without_cgroups(machine: Machine) -> None:
    memory = machine.read()
    assert memory.limit == Limit(64 * GIB, "MemTotal")
    assert memory.available == Limit(60 * GIB + 768 * MIB, "MemAvailable")  # our own anonymous memory counts as ours
    assert memory.process_bytes == GIB
    assert not memory.may_grow


def test_cgroup_v1_unlimited_changes_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/job\n0::/\n")
    machine.mounts(V1_MOUNT.format(root="/"))
    machine.v1("/job", 9223372036854771712, usage=5 * GIB)
    assert machine.read().limit.source == "MemTotal"


def test_cgroup_v1_of_a_container_is_what_is_mounted(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    machine.mounts(V1_MOUNT.format(root="/docker/abc"))
    machine.v1("", 8 * GIB, usage=6 * GIB, cache=2 * GIB)
    memory = machine.read()
    assert memory.limit == Limit(8 * GIB, "cgroup v1 memory.limit_in_bytes of /")
    # 6 used, 2 of them page cache, 0.75 ours: 3.25 GiB belong to others
    assert memory.available.bytes == 8 * GIB - (4 * GIB - 768 * MIB)


def test_cgroup_v1_controller_is_found_in_a_list_and_others_are_not_taken_for_it(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:hugetlb:/x\n4:cpu,memory:/job\n")
    machine.mounts(
        "34 31 0:31 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb",
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory",
    )
    machine.v1("/job", 3 * GIB)
    assert machine.read().limit.bytes == 3 * GIB


@pytest.mark.parametrize(
    ("limits", "expected", "where"),
    [
        ([None, 16 * GIB, None], 16 * GIB, "/a"),
        ([None, 16 * GIB, 12 * GIB], 12 * GIB, "/a/b"),
        ([None, 12 * GIB, 16 * GIB], 12 * GIB, "/a"),
        ([None, 200 * GIB, None], 64 * GIB, None),
    ],
)
def test_nested_cgroup_v2_smallest_on_the_way_up_wins(
    machine: Machine, limits: list[int | None], expected: int, where: str | None
) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.mounts(V2_MOUNT.format(root="/"))
    machine.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")  # the root group has no memory.max
    for folder, limit in zip(("/a", "/a/b"), limits[1:], strict=True):
        machine.v2(folder, limit)
    memory = machine.read()
    assert memory.limit.bytes == expected
    assert memory.limit.source == (f"cgroup v2 memory.max of {where}" if where else "MemTotal")


def test_available_counts_a_parent_group_filled_by_a_neighbour(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/ours\n")
    machine.mounts(V2_MOUNT.format(root="/"))
    machine.v2("/pod", 32 * GIB, usage=25 * GIB, cache=5 * GIB)
    machine.v2("/pod/ours", 16 * GIB, usage=GIB)
    memory = machine.read()
    assert memory.limit == Limit(16 * GIB, "cgroup v2 memory.max of /pod/ours")
    assert memory.available == Limit(32 * GIB - (20 * GIB - 768 * MIB), "free under cgroup v2 memory.max of /pod")


def test_cgroup_v2_high_throttles_and_is_a_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.mounts(V2_MOUNT.format(root="/"))
    machine.v2("/job", 32 * GIB, high=20 * GIB)
    assert machine.read().limit == Limit(20 * GIB, "cgroup v2 memory.high of /job")


def test_cgroup_namespace_hides_the_path(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/../../elsewhere\n")
    machine.mounts(V2_MOUNT.format(root="/"))
    machine.v2("", 6 * GIB)
    assert machine.read().limit == Limit(6 * GIB, "cgroup v2 memory.max of /")


def test_hybrid_v1_memory_with_an_empty_v2_tree(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/slice/job\n0::/slice/job\n")
    machine.mounts(V1_MOUNT.format(root="/"), "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
    machine.v1("/slice", 10 * GIB)
    machine.v1("/slice/job", UNLIMITED)
    machine.write("sys/fs/cgroup/unified/slice/job/cgroup.procs", "1\n")
    assert machine.read().limit == Limit(10 * GIB, "cgroup v1 memory.limit_in_bytes of /slice")


@pytest.mark.parametrize(
    ("which", "name", "used"),
    [(resource.RLIMIT_AS, "RLIMIT_AS", 4 * GIB), (resource.RLIMIT_DATA, "RLIMIT_DATA", 2 * GIB)],
)
def test_rlimits_count_address_space_already_used(machine: Machine, which: int, name: str, used: int) -> None:
    machine.rlimits[which] = 20 * GIB
    assert machine.read().limit == Limit(20 * GIB - used + GIB, name)


def hotplug(machine: Machine) -> None:
    driver = machine.root / "sys/bus/virtio/drivers/virtio_mem"
    driver.mkdir(parents=True)
    (driver / "virtio3").symlink_to("../../../../devices/pci0000:00/virtio3")


def lazily_present(machine: Machine, *, balloon: str) -> None:
    pages = 256 * GIB // resource.getpagesize()
    machine.write("proc/zoneinfo", f"Node 0, zone   Normal\n        spanned  {pages}\n        present  {pages}\n")
    machine.write("proc/meminfo", (machine.root / "proc/meminfo").read_text() + balloon)


def test_memory_that_is_plugged_in_as_used_follows_the_cgroup(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.mounts(V2_MOUNT.format(root="/"))
    machine.v2("/job", 250 * GIB, usage=2 * GIB)
    assert machine.read().limit.bytes == 64 * GIB  # without such a device, a limit above MemTotal means nothing
    hotplug(machine)
    memory = machine.read()
    assert memory.limit.bytes == 250 * GIB
    assert "plugged in" in memory.limit.source
    assert memory.available.bytes == 250 * GIB - (2 * GIB - 768 * MIB)


def test_memory_that_may_be_plugged_in_without_a_stated_end(machine: Machine) -> None:
    hotplug(machine)
    memory = machine.read()
    assert memory.limit == Limit(64 * GIB, "MemTotal")
    assert memory.may_grow


def test_pages_present_but_not_yet_handed_out_are_counted(machine: Machine) -> None:
    lazily_present(machine, balloon="Balloon: 0 kB\n")
    memory = machine.read()
    assert memory.limit.bytes == int(256 * GIB * 0.97)
    assert memory.available == memory.limit


@pytest.mark.parametrize("balloon", ["", f"Balloon: {kib(192 * GIB)}\n"], ids=["unstated", "inflated"])
def test_pages_in_a_balloon_are_not_counted(machine: Machine, balloon: str) -> None:
    lazily_present(machine, balloon=balloon)
    assert machine.read().limit == Limit(64 * GIB, "MemTotal")


def test_this_machine_can_be_read() -> None:
    memory = read_host_memory()
    assert 0 < memory.process_bytes < memory.limit.bytes
    assert memory.available.bytes <= memory.limit.bytes


def test_wsl2_locks_half_of_its_memory_or_what_rlimit_says(machine: Machine) -> None:
    def read() -> Limit | None:
        return read_page_lock(root=machine.root, rlimit=lambda which: machine.rlimits.get(which, UNLIMITED))

    machine.write("proc/version", "Linux version 6.8.0-generic (buildd@host)\n")
    machine.rlimits[resource.RLIMIT_MEMLOCK] = 64 << 10
    assert read() is None  # the driver of a real machine does not ask
    machine.write("proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@host)\n")
    assert read() == Limit(64 << 10, "RLIMIT_MEMLOCK under WSL2")
    machine.rlimits.clear()
    half = read()
    assert half is not None
    assert half.bytes == 32 * GIB
    assert "WSL2" in half.source


def test_the_soft_limit_of_this_process_is_what_is_asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Callable[[int], tuple[int, int]] = lambda which: (  # noqa: E731
        (12 * GIB, 90 * GIB) if which == resource.RLIMIT_DATA else (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    monkeypatch.setattr(resource, "getrlimit", asked)
    assert read_host_memory(root=machine.root).limit == Limit(11 * GIB, "RLIMIT_DATA")
