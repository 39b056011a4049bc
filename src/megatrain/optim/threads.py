"""How many threads the optimizer may use: the cores of this process, whatever OMP_NUM_THREADS says."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

_Reader = Callable[[Path], float | None]

LEFT_FREE = 2
"""Cores left to the interpreter and the driver, where there are more than `SMALL`."""
SMALL = 4


def optimizer_threads(requested: int | None = None) -> int:
    """Threads for the optimizer kernel: what was asked for, else the usable cores minus two when more than four."""
    if requested is not None:
        return requested
    cores = usable_cores()
    return cores - LEFT_FREE if cores > SMALL else cores


def usable_cores(*, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity mask, cut by the tightest CPU quota of its cgroup or a parent."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota(proc=proc, root=root)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cgroup_quota(*, proc: Path, root: Path) -> float | None:
    """The smallest CPU quota, in cores, from this process's cgroup up to the root; None if there is none."""
    if not proc.exists():
        return None
    quotas: list[float] = []
    for line in proc.read_text().splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0" and not controllers:
            quotas += _quotas(root, group, read=_quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root / "cpu", group, read=_quota_v1)
            quotas += _quotas(root / "cpu,cpuacct", group, read=_quota_v1)
    return min(quotas, default=None)


def _quotas(root: Path, group: str, *, read: _Reader) -> list[float]:
    """Quotas of `group` and its parents. A container may see a path of its host: the root is always read too."""
    folder = root / group.lstrip("/")
    folders = [folder, *(p for p in folder.parents if p.is_relative_to(root))]
    return [quota for quota in map(read, folders) if quota is not None]


def _quota_v2(folder: Path) -> float | None:
    """`cpu.max` holds "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    text = _text(folder / "cpu.max")
    if not text or text.startswith("max"):
        return None
    quota, period = text.split()
    return int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    """`cpu.cfs_quota_us` is -1 without a quota."""
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) < 0:
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
