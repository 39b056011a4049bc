"""What to change when a run does not fit, and by how much: each change is really planned again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import smallest
from megatrain.plan.job import Job
from megatrain.plan.words import GIB, gib

SHORTER = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
"""Shares of data.max_seq_len that are tried, until one is enough."""
ROUND = 64
"""Lengths are multiples of it."""


@dataclass(frozen=True)
class Advice:
    """One change. `saves`: bytes of the memory that is short, in the smallest plan."""

    change: str
    saves: int
    enough: bool  # alone

    def __str__(self) -> str:
        return f"{self.change} (saves {gib(self.saves)})" if self.saves else self.change


def advise(job: Job, *, short: MemoryPlan) -> tuple[Advice, ...]:
    """Changes that help a job whose smallest plan `short` does not fit: those that are enough alone first."""
    found = [*_smaller(job, short=short), *_larger(job, short=short)]
    return tuple(sorted(found, key=lambda a: (not a.enough, a.saves == 0, -a.saves)))


def _smaller(job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    memory = job.memory
    for field in ("micro_batch", "slots", "activations"):
        stated = getattr(memory, field)
        if stated != "auto" and not (field == "activations" and stated == "host"):
            freed = replace(job, memory=replace(memory, **{field: "auto"}))
            yield from _change(f"leave memory.{field} at auto", freed, short=short)
    if job.moment_bytes > 2:
        yield from _change("optimizer.state: bf16", replace(job, moment_bytes=2), short=short)
    yield from _halved_batch(job, short=short)
    yield from _shorter_rows(job, short=short)


def _change(text: str, job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    """The advice, if the change saves anything where memory is short."""
    least = smallest(job)
    saves = _needed(short, short=short) - _needed(least, short=short)
    if saves > 0:
        yield Advice(text, saves, least.fits)


def _needed(plan: MemoryPlan, *, short: MemoryPlan) -> int:
    return plan.host_total if short.device_fits else plan.device_total


def _halved_batch(job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    first: Advice | None = None
    rows = job.batch_size
    while rows > 1:
        rows = -(-rows // 2)
        text = f"train.batch_size {job.batch_size} -> {rows}"
        found = next(_change(text, replace(job, batch_size=rows), short=short), None)
        if found is not None and found.enough:
            yield found
            return
        first = first or found
    if first is not None:
        yield first


def _shorter_rows(job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    first: Advice | None = None
    for share in SHORTER:
        length = int(job.seq_len * share) // ROUND * ROUND
        if not 0 < length < job.seq_len:
            continue
        text = f"data.max_seq_len {job.seq_len} -> {length}"
        found = next(_change(text, replace(job, seq_len=length), short=short), None)
        if found is not None and found.enough:
            yield found
            return
        first = first or found
    if first is not None:
        yield first


def _larger(job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    """Limits that would do: of the recipe, the container, the machine."""
    device_limit, host_limit = short.device_limit, short.host_limit
    host_fits = short.host_total <= host_limit.bytes
    if device_limit is not None and not short.device_fits:
        wanted = _rounded(short.device_total)
        card = job.limits.device
        if device_limit.source == "memory.vram" and (card is None or wanted <= card.free_bytes):
            yield Advice(f"raise memory.vram to {_size(wanted)}", 0, host_fits)
        elif card is not None and wanted <= card.total_bytes:
            yield Advice(f"free the device of other programs, or raise memory.vram to {_size(wanted)}", 0, host_fits)
        else:
            yield Advice(f"a device with {_size(wanted)} to spare", 0, host_fits)
    if not host_fits:
        wanted = _rounded(short.host_total)
        if host_limit.source == "memory.host" and wanted <= job.limits.host.limit.bytes:
            yield Advice(f"raise memory.host to {_size(wanted)}", 0, short.device_fits)
        elif "cgroup" in host_limit.source:
            yield Advice(f"give the container more memory: {_size(wanted)}", 0, short.device_fits)
        else:
            yield Advice(f"a machine with {_size(wanted)} of host memory", 0, short.device_fits)


def _rounded(size: int) -> int:
    return -(-size // (GIB // 2)) * (GIB // 2)


def _size(size: int) -> str:
    return f"{size / GIB:g}GiB"
