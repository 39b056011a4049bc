"""How much this machine lets one process have, and who says so.

Two questions, kept apart. The *limit* is what may be used at all: the smallest of MemTotal, every memory
cgroup above this process (v1 and v2, nested) and RLIMIT_AS / RLIMIT_DATA. It does not change from run to
run, so a plan made from it is the same plan tomorrow. What is *available* is the part of it that other
processes leave free right now; a plan is refused, not altered, when that is too little.

Virtual machines may hand memory out as it is touched; MemTotal is then only what was handed out so far. Two
signs of it are known. The kernel lists pages as present that it does not count yet: those are believed. Or
a device that plugs memory in is bound: a cgroup limit above MemTotal is believed, and failing that
`memory.host` of the recipe.

GPU memory arrives here as integers: this room has no torch.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 62
"""cgroup v1 writes about 2^63 where nothing is set; RLIM_INFINITY reads as -1. Both mean no limit."""
PRESENT_SLACK = 1.1
"""Present pages exceed MemTotal by what the kernel keeps for itself, a few per cent; beyond that they are to come."""
PRESENT_USABLE = 0.97
"""The share of present pages that ends up in MemTotal; the kernel's own tables take the rest."""
HOTPLUG_DRIVERS = ("virtio/drivers/virtio_mem", "vmbus/drivers/hv_balloon")
"""Drivers, under /sys/bus, that add memory to a running machine; a bound device is a link in the folder."""


@dataclass(frozen=True)
class Limit:
    """A number of bytes and where it was read."""

    bytes: int
    source: str


@dataclass(frozen=True)
class HostMemory:
    """What the host gives this process. `process_bytes` is what it already holds, included in both limits."""

    limit: Limit
    available: Limit
    process_bytes: int
    may_grow: bool  # memory can be plugged in, and nothing says how much: a stated ceiling is worth more than MemTotal


@dataclass(frozen=True)
class DeviceMemory:
    """GPU memory as the driver counts it, passed in by whoever may ask the driver."""

    total_bytes: int
    free_bytes: int  # what this process could hold: free now, plus what it already holds (its context)
    name: str


@dataclass(frozen=True)
class _Cgroup:
    """One memory cgroup: its ceiling, and what of its usage could not be reclaimed."""

    limit: Limit
    held_bytes: int


def read_host_memory(*, root: Path = Path("/"), rlimit: Callable[[int], int] | None = None) -> HostMemory:
    """Read the limits of this process. `root` holds proc/ and sys/; `rlimit` maps RLIMIT_* to the soft limit."""
    info = _fields(root / "proc/meminfo")
    status = _fields(root / "proc/self/status")
    own = status["VmRSS"]
    own_anonymous = status.get("RssAnon", own) + status.get("RssShmem", 0)
    groups = list(_cgroups(root))
    installed = _installed(info, groups=groups, root=root)
    limit = _smallest([installed, *(g.limit for g in groups), *_rlimits(status, rlimit or _soft_limit)])
    free = [
        Limit(max(0, g.limit.bytes - max(0, g.held_bytes - own_anonymous)), f"free under {g.limit.source}")
        for g in groups
    ]
    counted = installed.source == "MemTotal"  # elsewhere MemAvailable is too small in the same way
    if counted:
        free.append(Limit(info["MemAvailable"] + own_anonymous, "MemAvailable"))
    return HostMemory(limit, _smallest([*free, limit]), own, may_grow=counted and limit is installed and _grows(root))


def read_page_lock(*, root: Path = Path("/"), rlimit: Callable[[int], int] | None = None) -> Limit | None:
    """How much a device may read without a copy, where that is less than memory: on WSL2. None: no limit is known.

    Windows lends its guest about half of the guest's memory for page-locking, and counts RLIMIT_MEMLOCK. NVIDIA's own
    Linux driver asks for neither; what else stands in the way there (a container, a sandbox) only trying tells, which
    is what `megatrain doctor` does.
    """
    version = "".join(_lines(root / "proc/version")).lower()
    if "microsoft" not in version:
        return None
    half = Limit(_fields(root / "proc/meminfo")["MemTotal"] // 2, "WSL2 page-locks half of its memory at most")
    locked = (rlimit or _soft_limit)(resource.RLIMIT_MEMLOCK)
    return half if locked >= half.bytes else Limit(locked, "RLIMIT_MEMLOCK under WSL2")


def _smallest(limits: list[Limit]) -> Limit:
    return min(limits, key=lambda limit: limit.bytes)


def _installed(info: dict[str, int], *, groups: list[_Cgroup], root: Path) -> Limit:
    total = info["MemTotal"]
    # pages in a balloon are present and not to be had: without the kernel's word on it, present pages mean nothing
    present = _present(root) - info["Balloon"] if "Balloon" in info else 0
    if present > total * PRESENT_SLACK:
        return Limit(int(present * PRESENT_USABLE), "present pages (memory is handed out as it is used)")
    above = [g.limit for g in groups if g.limit.bytes > total]
    if above and _grows(root):
        best = _smallest(above)
        return Limit(best.bytes, f"{best.source} (memory is plugged in as it is used)")
    return Limit(total, "MemTotal")


def _present(root: Path) -> int:
    """Bytes of all zones' present pages; 0 where the kernel does not tell."""
    words = (line.split() for line in _lines(root / "proc/zoneinfo"))
    return sum(int(w[1]) for w in words if len(w) == 2 and w[0] == "present") * resource.getpagesize()


def _grows(root: Path) -> bool:
    folders = (root / "sys/bus" / driver for driver in HOTPLUG_DRIVERS)
    return any(entry.is_symlink() for folder in folders if folder.is_dir() for entry in folder.iterdir())


def _soft_limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _rlimits(status: dict[str, int], rlimit: Callable[[int], int]) -> Iterator[Limit]:
    """Address-space limits count more than memory (libraries, reservations): only what is left of them is ours."""
    for name, which, used in (
        ("RLIMIT_AS", resource.RLIMIT_AS, status["VmSize"]),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, status["VmData"]),
    ):
        soft = rlimit(which)
        if soft < UNLIMITED:
            yield Limit(max(0, soft - used) + status["VmRSS"], name)


def _fields(path: Path) -> dict[str, int]:
    """`Name:   123 kB` lines as bytes; lines of other forms are left out."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


# --- cgroups -----------------------------------------------------------------------------------------------


def _cgroups(root: Path) -> Iterator[_Cgroup]:
    """Every memory cgroup with a limit, from this process's own up to the top of what is mounted here."""
    for version, top, own in _memory_mounts(root):
        folder = top / own
        if not folder.is_dir():  # a cgroup namespace hides the path: the mount itself is the group seen from here
            folder = top
        while True:
            yield from _read_cgroup(folder, version=version, label=_label(folder, top))
            if folder == top:
                break
            folder = folder.parent


def _memory_mounts(root: Path) -> Iterator[tuple[int, Path, str]]:
    """(version, mount point, own path below it) of the hierarchies that may limit memory."""
    own: dict[int, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount_root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        version = {"cgroup2": 2, "cgroup": 1}.get(kind)
        if version is None or version not in own or (version == 1 and "memory" not in options.split(",")):
            continue
        path = own[version]
        if mount_root != "/" and (path == mount_root or path.startswith(mount_root + "/")):
            path = path.removeprefix(mount_root)  # a container: its own group is what is mounted
        yield version, root / point.lstrip("/"), "" if ".." in path else path.strip("/")


def _read_cgroup(folder: Path, *, version: int, label: str) -> Iterator[_Cgroup]:
    names, usage_name, cache = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
    }[version]
    usage = _number(folder / usage_name) or 0
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    held = max(0, usage - sum(int(stat.get(name, 0)) for name in cache))
    for name in names:
        limit = _number(folder / name)
        if limit is not None and limit < UNLIMITED:
            yield _Cgroup(Limit(limit, f"cgroup v{version} {name} of {label}"), held)


def _label(folder: Path, top: Path) -> str:
    return "/" + str(folder.relative_to(top)) if folder != top else "/"


def _number(path: Path) -> int | None:
    """The integer in a control file; None where the file is absent (the root group has none) or says "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
