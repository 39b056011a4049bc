"""Every way to cut a step into micro-batches, best first, and the first that fits."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.plan.accounting import LOAD_BUFFERS, MemoryPlan, account
from megatrain.plan.experts import FEWEST
from megatrain.plan.job import Job
from megatrain.plan.spend import spend

USEFUL_TOKENS = 16_384
"""Tokens of a micro-batch beyond which kernels get no faster; a larger one only costs memory."""
HEAD_SLICES = (4, 8, 16)
"""How many slices the head is cut into, where it is: fewest first."""
TILE_TOKENS = 8192
"""Of a tile of the layers' MLPs, where rows are so long that a layer's backward does not fit."""
WORTH_TOKENS = 8192
"""Tokens of a micro-batch below which a larger one is worth a second product with the head. On an H200 a 7B shape
made 9,083 tok/s with 3k tokens at once and the head whole, 10,405 with 11k and slices, 10,990 with 11k and the head
whole."""
GROUPS_GAIN = 1.5
"""How many times the rows at once twice as many groups of experts must give."""
GRAD_BUFFERS = 2
"""A gradient is on its way home while the next one is cast. One does where memory is short: a layer's backward takes
longer than its gradient's way, unless a step has few tokens."""


def attempt(job: Job) -> MemoryPlan:
    """The best plan that fits; if none does, the nearest (`fits` is then False).

    The head is cut into slices only where nothing fits otherwise, or where micro-batches below WORTH_TOKENS can so be
    made twice as large: slices cost a second product with the head. Gradients go home through one buffer in place of
    two only where nothing fits otherwise, or where micro-batches below WORTH_TOKENS get larger. Experts come in groups
    only where nothing fits otherwise; in as few as fit, or in more where that gives half as many rows again: every
    group passes over all tokens. MLPs run in tiles only where nothing fits otherwise: such layers are not compiled. A
    resumed run stays as it was.
    """
    chosen = _sliced(job, groups=_resumed_groups(job), tile=_resumed_tile(job))
    if _may_tile(job) and not chosen.fits and not _host_is_short(chosen):
        chosen = _sliced(job, groups=0, tile=TILE_TOKENS)
    if not chosen.fits:
        chosen = _grouped(job, chosen)
    return spend(chosen, job=job) if chosen.fits else nearest(job)


def _grouped(job: Job, chosen: MemoryPlan) -> MemoryPlan:
    """`chosen`, which does not fit, with experts in groups where that helps."""
    for groups in _group_counts(job):
        if _worth(chosen, job=job) or _host_is_short(chosen):
            break
        other = _sliced(job, groups=groups, tile=0)
        if not chosen.fits or (other.fits and other.micro_batch >= GROUPS_GAIN * chosen.micro_batch):
            chosen = other
    return chosen


def _sliced(job: Job, *, groups: int, tile: int) -> MemoryPlan:
    """The best plan with so many groups of experts; with as many slices of the head, and buffers for gradients, as it
    takes."""
    chosen = _searched(job, groups=groups, tile=tile, grad_buffers=GRAD_BUFFERS)
    if _worth(chosen, job=job):
        return chosen
    other = _searched(job, groups=groups, tile=tile, grad_buffers=1)
    return other if other.fits and (not chosen.fits or other.micro_batch > chosen.micro_batch) else chosen


def _searched(job: Job, *, groups: int, tile: int, grad_buffers: int) -> MemoryPlan:
    """The best of those with so many buffers for gradients."""
    chosen = _first(job, slices=_resumed_slices(job), groups=groups, tile=tile, grad_buffers=grad_buffers)
    for slices in HEAD_SLICES if _may_slice(job) and not job.resumed else ():
        if _worth(chosen, job=job):
            break
        other = _first(job, slices=slices, groups=groups, tile=tile, grad_buffers=grad_buffers)
        if other.fits and (not chosen.fits or other.micro_batch >= 2 * chosen.micro_batch):
            chosen = other
    return chosen


def _worth(chosen: MemoryPlan, *, job: Job) -> bool:
    """Whether it fits with micro-batches so large that nothing need be given for larger ones."""
    return chosen.fits and chosen.micro_batch * job.seq_len >= min(WORTH_TOKENS, job.batch_size * job.seq_len)


def nearest(job: Job) -> MemoryPlan:
    """The plan that misses its limits by least, each in shares of itself; of equals, the least of the simplest.

    One row at once takes least of the device, and as much of the host as many do. Where the layers' inputs wait, slices
    of the head, groups and tiles move bytes between the two or free some, so each is looked at.
    """
    few, *_, many = (_resumed_groups(job), *_group_counts(job), max((0, *_group_counts(job))))
    tiles = (_resumed_tile(job), TILE_TOKENS) if _may_tile(job) else (_resumed_tile(job),)
    ways = dict.fromkeys([*((groups, 0) for groups in (few, many)), *((0, tile) for tile in tiles)])
    slices = (0, HEAD_SLICES[-1]) if _may_slice(job) and not job.resumed else (_resumed_slices(job),)
    *_, rows = _micro_batches(job)

    def least(groups: int, tile: int) -> MemoryPlan:
        plans = (
            _one_cut(job, micro_batch=rows, activations=place, slices=count, groups=groups, tile=tile, grad_buffers=1)
            for count in slices
            for place in _places(job)
        )
        return min(plans, key=lambda plan: (_missed(plan), plan.device_total + plan.host_total))

    return min((least(groups, tile) for groups, tile in ways), key=_missed)


def _missed(plan: MemoryPlan) -> float:
    """What lacks of each limit, as a share of it, summed up; 0 for a plan that fits."""
    pairs = [(plan.host_total, plan.host_limit)]
    if plan.device_limit is not None:
        pairs.append((plan.device_total, plan.device_limit))
    return sum(max(0, needed - limit.bytes) / max(1, limit.bytes) for needed, limit in pairs)


def _host_is_short(chosen: MemoryPlan) -> bool:
    """Whether it would be with the activations on the device as well."""
    return chosen.host_total - chosen.host.get("activations", 0) > chosen.host_limit.bytes


def _resumed_groups(job: Job) -> int:
    """Those of the run that goes on: they decide rounding."""
    return job.resumed.expert_groups if job.resumed and job.sizes.experts is not None else 0


def _resumed_tile(job: Job) -> int:
    """That of the run that goes on: it decides rounding."""
    return job.resumed.tile_tokens if job.resumed and job.sizes.tiling is not None else 0


def _may_tile(job: Job) -> bool:
    return job.sizes.tiling is not None and not job.on_cpu and not job.resumed and job.seq_len > TILE_TOKENS


def _group_counts(job: Job) -> Iterator[int]:
    """How many groups a layer's experts may come in: fewest first, at last as many as there can be."""
    experts = job.sizes.experts
    if experts is None or job.on_cpu or job.resumed:
        return
    groups, most = 2, experts.count // FEWEST
    while groups < most:
        yield groups
        groups *= 2
    yield most


def _resumed_slices(job: Job) -> int:
    """Those of the run that goes on, also on a CPU: they decide rounding."""
    return job.resumed.head_slices if job.resumed and job.sizes.slicing is not None else 0


def _may_slice(job: Job) -> bool:
    """On the CPU there is nothing to gain: the whole head is in the same memory."""
    return job.sizes.slicing is not None and not job.on_cpu


def _first(job: Job, *, slices: int, groups: int, tile: int, grad_buffers: int) -> MemoryPlan:
    """The first cut that fits; the last, if none does."""
    chosen: MemoryPlan | None = None
    for chosen in cuts(job, slices=slices, groups=groups, tile=tile, grad_buffers=grad_buffers):
        if chosen.fits:
            break
    assert chosen is not None
    return chosen


def cuts(
    job: Job, *, slices: int = 0, groups: int = 0, tile: int = 0, grad_buffers: int = GRAD_BUFFERS
) -> Iterator[MemoryPlan]:
    """Every plan with such slices of the head, groups of experts and tiles that is considered, best first."""
    for micro_batch in _micro_batches(job):
        for place in _places(job):
            yield _one_cut(
                job,
                micro_batch=micro_batch,
                activations=place,
                slices=slices,
                groups=groups,
                tile=tile,
                grad_buffers=grad_buffers,
            )


def _places(job: Job) -> tuple[str, ...]:
    """Where the layers' inputs may wait, best first."""
    wanted = job.memory.activations
    return ("device", "host") if wanted == "auto" else (wanted,)


def _one_cut(
    job: Job, *, micro_batch: int, activations: str, slices: int, groups: int, tile: int, grad_buffers: int
) -> MemoryPlan:
    memory = job.memory
    chosen = MemoryPlan(
        micro_batch=micro_batch,
        micro_batches=-(-job.batch_size // micro_batch),
        seq_len=job.seq_len,
        slots=2 if isinstance(memory.slots, str) else memory.slots,
        grad_buffers=min(grad_buffers, len(job.sizes.layers)),
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
        head_slices=slices,
        expert_groups=groups,
        tile_tokens=tile,
    )
    return account(chosen, terms=job.terms(micro_batch=micro_batch))


def _micro_batches(job: Job) -> Iterator[int]:
    """Rows at once, best first: every distinct way to cut the step into equal parts, none beyond the useful size.

    One alone where it is stated, or where a run goes on as it was cut.
    """
    stated, batch_size = job.memory.micro_batch, job.batch_size
    if not isinstance(stated, str):
        yield min(stated, batch_size)
        return
    if job.resumed:
        yield job.resumed.micro_batch
        return
    rows = max(1, USEFUL_TOKENS // job.seq_len) + 1
    while rows > 1:
        parts = -(-batch_size // (rows - 1))  # the fewest with fewer rows than before
        rows = -(-batch_size // parts)
        yield rows
