"""Every way to cut a step into micro-batches, best first, and the first that fits."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.plan.accounting import LOAD_BUFFERS, MemoryPlan, account
from megatrain.plan.job import Job
from megatrain.plan.spend import spend

USEFUL_TOKENS = 16_384
"""Tokens of a micro-batch beyond which kernels get no faster; a larger one only costs memory."""


def attempt(job: Job) -> MemoryPlan:
    """The best plan that fits; if none does, the smallest (`fits` is then False)."""
    chosen: MemoryPlan | None = None
    for chosen in cuts(job):
        if chosen.fits:
            return spend(chosen, job=job)
    assert chosen is not None
    return chosen


def smallest(job: Job) -> MemoryPlan:
    """The plan that takes least, whether it fits or not."""
    *_, last = cuts(job)
    return last


def cuts(job: Job) -> Iterator[MemoryPlan]:
    """Every plan that is considered, best first."""
    memory = job.memory
    places = ("device", "host") if memory.activations == "auto" else (memory.activations,)
    rows = _micro_batches(job)
    for micro_batch in [job.resumed.micro_batch] if job.resumed and isinstance(memory.micro_batch, str) else rows:
        for place in places:
            yield _one_cut(job, micro_batch=micro_batch, activations=place)


def _one_cut(job: Job, *, micro_batch: int, activations: str) -> MemoryPlan:
    memory = job.memory
    chosen = MemoryPlan(
        micro_batch=micro_batch,
        micro_batches=-(-job.batch_size // micro_batch),
        seq_len=job.seq_len,
        slots=2 if isinstance(memory.slots, str) else memory.slots,
        grad_buffers=min(2, len(job.sizes.layers)),
        activations=activations,
        load_buffers=LOAD_BUFFERS if activations == "host" else 0,
        input_bytes=micro_batch * job.seq_len * job.sizes.hidden_bytes_per_token,
        head_chunk=job.resumed.head_chunk if job.resumed else 0,
        threads=job.limits.threads if isinstance(memory.threads, str) else memory.threads,
        host={},
        device={},
        host_limit=job.host_limit,
        device_limit=job.device_limit,
        on_cpu=job.on_cpu,
    )
    return account(chosen, terms=job.terms(micro_batch=micro_batch))


def _micro_batches(job: Job) -> Iterator[int]:
    """Rows at once, best first: every distinct way to cut the step into equal parts, none beyond the useful size."""
    stated, batch_size = job.memory.micro_batch, job.batch_size
    if not isinstance(stated, str):
        yield min(stated, batch_size)
        return
    last = 0
    most = max(1, USEFUL_TOKENS // job.seq_len)
    for parts in range(-(-batch_size // most), batch_size + 1):
        rows = -(-batch_size // parts)
        if rows != last:
            yield rows
        last = rows
