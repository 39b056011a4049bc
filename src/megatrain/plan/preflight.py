"""What is known before the first byte of weights and is neither host memory nor VRAM: page-locking, disk."""

from __future__ import annotations

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.disk import DiskNeeds
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


def disk_shortage(needs: DiskNeeds, *, free: int) -> str | None:
    """What is missing, with words on what becomes of older checkpoints. None where there is room for all of them."""
    if free >= needs.all_kept:
        return None
    what = ", ".join(f"{name} {gib(size)}" for name, size in needs.table.items())
    if free >= needs.least:
        return (
            f"{gib(needs.all_kept)} of disk would hold every checkpoint that output.keep={needs.keep} keeps and "
            f"{gib(free)} are free ({what}): the oldest goes before a new one is written (or lower output.keep)"
        )
    return f"at least {gib(needs.least)} of disk are needed and {gib(free)} are free: {disk_words(needs)}"


def disk_words(needs: DiskNeeds) -> str:
    """What `needs.least` is made of."""
    said = []
    if needs.saves:
        two = needs.saves > 1 or needs.resumed
        said.append(
            f"a checkpoint takes {gib(needs.checkpoint)}"
            + (", and the one before stays until it is whole" if two else "")
        )
    if needs.export:
        said.append(f"the exported model {gib(needs.export)}" + (" beside the last" if needs.saves else ""))
    return "; ".join(said)
