"""What to change when a run does not fit, and by how much: each change is really planned again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import attempt, smallest
from megatrain.plan.hardware import Limit
from megatrain.plan.job import HOST_RESERVE, Job
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
    for changes in (_halved_batch(job), _shorter_rows(job)):
        yield from _mildest(changes, short=short)


def _change(text: str, job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    """The advice, if the change saves anything where memory is short."""
    least = smallest(job)
    saves = _needed(short, short=short) - _needed(least, short=short)
    if saves > 0:
        yield Advice(text, saves, _fits(job))


def _fits(job: Job) -> bool:
    return attempt(replace(job, can_reside=False)).fits


def _needed(plan: MemoryPlan, *, short: MemoryPlan) -> int:
    return plan.host_total if short.device_fits else plan.device_total


def _halved_batch(job: Job) -> Iterator[tuple[str, Job]]:
    rows = job.batch_size
    while rows > 1:
        rows = -(-rows // 2)
        yield f"train.batch_size {job.batch_size} -> {rows}", replace(job, batch_size=rows)


def _shorter_rows(job: Job) -> Iterator[tuple[str, Job]]:
    for share in SHORTER:
        length = int(job.seq_len * share) // ROUND * ROUND
        if 0 < length < job.seq_len:
            yield f"data.max_seq_len {job.seq_len} -> {length}", replace(job, seq_len=length)


def _mildest(changes: Iterator[tuple[str, Job]], *, short: MemoryPlan) -> Iterator[Advice]:
    """Of changes that grow, the first that is enough; where none is, the first that helps."""
    first: Advice | None = None
    for text, changed in changes:
        found = next(_change(text, changed, short=short), None)
        if found is not None and found.enough:
            yield found
            return
        first = first or found
    if first is not None:
        yield first


def _larger(job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    """Limits that would do: of the recipe, the container, the machine."""
    if short.device_limit is not None and not short.device_fits:
        yield _more_device(job, limit=short.device_limit, wanted=_rounded(short.device_total))
    if short.host_total > short.host_limit.bytes:
        reserve = HOST_RESERVE - job.reserve if job.reserve else 0  # more is left to the system of a larger machine
        yield _more_host(job, limit=short.host_limit, wanted=_rounded(short.host_total + reserve))
        open_ended = replace(job, memory=replace(job.memory, vram="auto"))
        if job.memory.vram != "auto" and job.limits.device is not None and _fits(open_ended):
            yield Advice("leave memory.vram at auto, so that activations stay on the device", 0, True)


def _more_device(job: Job, *, limit: Limit, wanted: int) -> Advice:
    card = job.limits.device
    raised = replace(job, memory=replace(job.memory, vram=wanted))
    if card is not None and wanted > card.free_bytes:
        larger = replace(card, total_bytes=max(wanted, card.total_bytes), free_bytes=wanted)
        raised = replace(raised, limits=replace(job.limits, device=larger))
    if limit.source == "memory.vram" and (card is None or wanted <= card.free_bytes):
        text = f"raise memory.vram to {_size(wanted)}"
    elif card is not None and wanted <= card.total_bytes:
        text = f"free the device of other programs, or raise memory.vram to {_size(wanted)}"
    else:
        text = f"a device with {_size(wanted)} to spare"
    return Advice(text, 0, _fits(raised))


def _more_host(job: Job, *, limit: Limit, wanted: int) -> Advice:
    host = job.limits.host
    raised = replace(job, limits=replace(job.limits, host=replace(host, limit=Limit(wanted, limit.source))))
    if limit.source == "memory.host":
        raised = replace(raised, memory=replace(job.memory, host=wanted))
    if limit.source == "memory.host" and wanted <= host.limit.bytes:
        text = f"raise memory.host to {_size(wanted)}"
    elif "cgroup" in limit.source:
        text = f"give the container more memory: {_size(wanted)}"
    else:
        text = f"a machine with {_size(wanted)} of host memory"
    return Advice(text, 0, _fits(raised))


def _rounded(size: int) -> int:
    return -(-size // (GIB // 2)) * (GIB // 2)


def _size(size: int) -> str:
    return f"{size / GIB:g}GiB"
