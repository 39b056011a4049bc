"""What to change when a run does not fit, and by how much: each change is really planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import attempt, nearest
from megatrain.plan.hardware import Limit
from megatrain.plan.job import Job
from megatrain.plan.words import GIB, gib

SHORTER = (3 / 4, 1 / 2, 3 / 8, 1 / 4, 1 / 8, 1 / 16)
"""Shares of data.max_seq_len that are tried, until one is enough."""
ROUND = 64
"""Lengths are multiples of it."""
WORTH = 0.02
"""Of what is missing: a change that saves less, and is not enough, helps nobody."""
MOST_HOST = 1 << 46
MOST_DEVICE = 288 * GIB
"""Beyond these no machine is advised: no one GPU has more."""
STEPS = ((32 * GIB, GIB // 2), (4 * GIB, GIB // 8), (0, GIB // 64))
"""From what size on machines are told apart by how much: always by less than 2 %, but for the smallest."""


@dataclass(frozen=True)
class Advice:
    """One change. `saves`: bytes of the memory that is short, from the nearest plan to that with the change; where it
    is not enough, of what is missing."""

    change: str
    saves: int
    enough: bool
    joint: bool = False  # two changes, each of which may be too little alone

    def __str__(self) -> str:
        return f"{self.change} (saves {gib(self.saves)})" if self.saves else self.change


def advise(job: Job, *, short: MemoryPlan) -> tuple[Advice, ...]:
    """Changes that help a job whose nearest plan `short` does not fit: those that are enough alone first."""
    found = [*_smaller(job, short=short), *_larger(job, short=short)]
    return tuple(sorted(found, key=lambda a: (not a.enough, a.saves == 0, -a.saves)))


def _smaller(job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    memory = job.memory
    for field in ("micro_batch", "slots", "activations"):
        stated = getattr(memory, field)
        if stated != "auto":
            freed = replace(job, memory=replace(memory, **{field: "auto"}))
            yield from _change(f"leave memory.{field} at auto", freed, short=short)
    if job.moment_bytes > 2:
        yield from _change("optimizer.state: bf16", replace(job, moment_bytes=2), short=short)
    for changes in (_halved_batch(job), _shorter_rows(job)):
        yield from _mildest(changes, short=short)


def _change(text: str, job: Job, *, short: MemoryPlan) -> Iterator[Advice]:
    """The advice, if the change saves anything to speak of where memory is short."""
    changed, enough = nearest(job), _fits(job)
    saves = _needed(short, short=short) - _needed(changed, short=short) if enough else _lacks(short) - _lacks(changed)
    if enough or saves > WORTH * _lacks(short):
        yield Advice(text, max(0, saves), enough)


def _fits(job: Job) -> bool:
    return attempt(replace(job, can_reside=False)).fits


def _needed(plan: MemoryPlan, *, short: MemoryPlan) -> int:
    """Bytes that `plan` takes of what is short in `short`."""
    host = plan.host_total if short.host_total > short.host_limit.bytes else 0
    return host + (0 if short.device_fits else plan.device_total)


def _lacks(plan: MemoryPlan) -> int:
    """Bytes beyond the limits."""
    device = 0 if plan.device_limit is None else plan.device_total - plan.device_limit.bytes
    return max(0, plan.host_total - plan.host_limit.bytes) + max(0, device)


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
    """The least limits that really do: of the recipe, the container, the machine. Both, where both are short."""
    host = _least(job.host_limit.bytes, most=MOST_HOST, fits=lambda size: _fits(_with_host(job, size)))
    if host is not None:
        yield Advice(_more_host(job, wanted=host), 0, True)
    limit = job.device_limit if job.limits.device is not None else None
    if limit is None:
        return
    device = _least(limit.bytes, most=MOST_DEVICE, fits=lambda size: _fits(_with_device(job, size)))
    if device is not None:
        yield Advice(_more_device(job, limit=limit, wanted=device), 0, True)
    if not short.device_fits and short.host_total > short.host_limit.bytes:
        yield from _both(job, limit=limit, short=short)
    if short.device_fits and job.memory.vram != "auto" and _fits(replace(job, memory=replace(job.memory, vram="auto"))):
        yield Advice("leave memory.vram at auto, so that activations stay on the device", 0, True)


def _both(job: Job, *, limit: Limit, short: MemoryPlan) -> Iterator[Advice]:
    """The device of the nearest plan, and the least host beside it."""
    device = _rounded(short.device_total)
    larger = _with_device(job, device)
    host = _least(job.host_limit.bytes, most=MOST_HOST, fits=lambda size: _fits(_with_host(larger, size)))
    if host is not None and device <= MOST_DEVICE:
        changes = _more_device(job, limit=limit, wanted=device), _more_host(job, wanted=host)
        yield Advice(" together with ".join(changes), 0, True, joint=True)


def _least(start: int, *, most: int, fits: Callable[[int], bool]) -> int | None:
    """The least size beyond `start` that fits, in STEPS, where more always fits too; None if not even `most` does."""
    low, high = start, min(most, max(2 * start, GIB))
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(most, 2 * high)
    step = _step(low)
    below, enough = low // step, -(-high // step)
    while enough - below > 1:
        middle = (below + enough) // 2
        below, enough = (below, middle) if fits(middle * step) else (middle, enough)
    return enough * step


def _step(size: int) -> int:
    return next(step for least, step in STEPS if size >= least)


def _with_device(job: Job, size: int) -> Job:
    """With so much of a device to take, larger than ours if need be."""
    card = job.limits.device
    if card is not None and size > card.free_bytes:
        card = replace(card, total_bytes=max(size, card.total_bytes), free_bytes=size)
    return replace(job, memory=replace(job.memory, vram=size), limits=replace(job.limits, device=card))


def _with_host(job: Job, size: int) -> Job:
    """On a host that gives so much, to whoever set the limit."""
    host = job.limits.host
    raised = replace(job, limits=replace(job.limits, host=replace(host, limit=Limit(size, job.host_limit.source))))
    stated = not isinstance(job.memory.host, str) and job.host_limit.source == "memory.host"
    return replace(raised, memory=replace(job.memory, host=size)) if stated else raised


def _more_device(job: Job, *, limit: Limit, wanted: int) -> str:
    card = job.limits.device
    if limit.source == "memory.vram" and (card is None or wanted <= card.free_bytes):
        return f"raise memory.vram to {_size(wanted)}"
    if card is not None and wanted <= card.total_bytes:
        return f"free the device of other programs, or raise memory.vram to {_size(wanted)}"
    return f"a device with {_size(wanted)} to spare"


def _more_host(job: Job, *, wanted: int) -> str:
    host, limit = job.limits.host, job.host_limit
    if limit.source == "memory.host" and wanted <= host.limit.bytes:
        return f"raise memory.host to {_size(wanted)}"
    if "cgroup" in limit.source:
        return f"give the container more memory: {_size(wanted)}"
    return f"a machine with {_size(wanted)} of host memory"


def _rounded(size: int) -> int:
    step = _step(size)
    return -(-size // step) * step


def _size(size: int) -> str:
    """As a recipe takes it, exactly."""
    return f"{size / GIB:g}GiB" if size >= 4 * GIB else f"{size >> 20}MiB"
