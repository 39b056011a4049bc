"""What is known before the first byte of weights and is neither host memory nor VRAM: page-locking, disk."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.disk import KEPT
from megatrain.plan.job import Job
from megatrain.plan.words import gib


def page_lock_warning(plan: MemoryPlan, *, job: Job) -> str | None:
    """What will be pageable, and so slower to copy, if less can be page-locked than the plan wants. None: nothing."""
    limit = job.limits.page_lock
    if plan.on_cpu or limit is None or plan.pinned_bytes <= limit.bytes:
        return None
    return (
        f"{gib(plan.pinned_bytes)} are to be page-locked and {gib(limit.bytes)} can be ({limit.source}): the rest is "
        "pageable, and copies from it are several times slower"
    )


def disk_shortage(disk: Mapping[str, int], *, free: int) -> str | None:
    """What is missing for everything that `disk_bytes` lists. None where there is room."""
    needed = sum(disk.values())
    if needed <= free:
        return None
    purposes = ", ".join(f"{name} {gib(size)}" for name, size in disk.items())
    said = f"{gib(needed)} of disk are needed and {gib(free)} are free: {purposes}"
    if disk_suffices(disk, free=free):
        return f"{said}; the oldest checkpoint goes before a new one is written (or lower output.keep)"
    return said


def disk_suffices(disk: Mapping[str, int], *, free: int) -> bool:
    """Whether a run can end: one checkpoint and the export. Older checkpoints make room where there is none."""
    return sum(size for purpose, size in disk.items() if purpose != KEPT) <= free
