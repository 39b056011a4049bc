"""What spare memory is spent on once the step is cut: units that stay on the device, attention and graphs kept.

Of the device, in this order, each as far as it fits:

1. *resident units*, those needed first first: the stem, layer 0, 1, ..., at last the tail. Their weights, masters,
   moments and gradients stay on the device and are updated there, so nothing of them crosses the link in a step and
   the CPU has less to update;
2. when all units are resident, *kept layers*, from the last: the forward's graph of every micro-batch waits for the
   backward, which then recomputes nothing.

Where rows are long, what attention gave is kept too (plan/attention.py): on the device if all units stay there and it
fits, else on the host, else on the device instead of some units; only where memory.activations says, if it does.

The micro-batch is never made smaller for it. None of it changes a bit of the result, but that a compiled forward
with a graph is another program than one without: so a run that goes on keeps as many graphs as it kept before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatrain.plan.accounting import MemoryPlan, account
from megatrain.plan.attention import with_attention, worth
from megatrain.plan.job import Job

SPEND_SHARE = 0.95
"""Of the ceiling: estimates are good to 5 %, and what is spare is not worth running out of memory."""


def spend(chosen: MemoryPlan, *, job: Job) -> MemoryPlan:
    """`chosen`, which fits, with as much of the spare memory used as does good."""
    plain = _stay(chosen, job=job)
    before = None if job.resumed is None else bool(job.resumed.attention)
    if chosen.expert_groups or before is False or not (before or worth(job)):
        return plain
    if plain.kept == len(job.sizes.layers):  # nothing is recomputed
        return plain
    device, host = (_keeping(chosen, job=job, where=where) for where in ("device", "host"))
    if device is not None and (host is None or device.resident >= len(job.sizes.layers) + 2):
        return device
    return host or device or plain


def _keeping(chosen: MemoryPlan, *, job: Job, where: str) -> MemoryPlan | None:
    """With attention kept there; None if it does not fit, the model has none that can be (a resumed run may have had
    another device), or memory.activations has another place for such things."""
    if not job.sizes.attention_bytes_per_token or job.memory.activations not in ("auto", where):
        return None
    kept = with_attention(chosen, job=job, where=where)
    device, host = kept.device_limit, kept.host_limit
    spare = device is None or kept.device_total <= device.bytes * SPEND_SHARE
    if where == "host":
        spare = spare and kept.host_total <= host.bytes * SPEND_SHARE
    return _stay(kept, job=job) if spare and kept.fits else None


def _stay(chosen: MemoryPlan, *, job: Job) -> MemoryPlan:
    """With units and graphs kept on the device."""
    if not job.can_reside:
        return chosen
    if chosen.head_slices or chosen.expert_groups:  # memory is short; and what stays is whole
        return chosen
    layers = len(job.sizes.layers)
    units = layers + 2

    def fits(plan: MemoryPlan) -> bool:
        if plan.device_limit is None:
            return plan.host_total <= plan.host_limit.bytes * SPEND_SHARE
        return plan.fits and plan.device_total <= plan.device_limit.bytes * SPEND_SHARE

    def resident(count: int) -> MemoryPlan:
        return _with(chosen, job=job, resident=count)

    # the slots go when the last layer is resident, so the costs do not rise all the way: the ends are tried apart
    for count in (units, units - 1):
        if fits(resident(count)):
            break
    else:
        count = _most(layers, fits=lambda n: fits(resident(n)))
    if count < units or chosen.load_buffers or chosen.attention_buffers or chosen.tile_tokens:
        return resident(count) if count else chosen
    most = min(layers, job.resumed.kept) if job.resumed else layers
    kept = _most(most, fits=lambda n: fits(_with(chosen, job=job, resident=count, kept=n)))
    return _with(chosen, job=job, resident=count, kept=kept)


def _with(chosen: MemoryPlan, *, job: Job, resident: int, kept: int = 0) -> MemoryPlan:
    layers = len(job.sizes.layers)
    streamed = layers - min(layers, max(0, resident - 1))
    changed = replace(
        chosen,
        resident=resident,
        kept=kept,
        slots=min(chosen.slots, streamed) if resident > 1 else chosen.slots,
        grad_buffers=chosen.grad_buffers if resident < layers + 2 else 0,
    )
    return account(changed, terms=job.terms(micro_batch=chosen.micro_batch))


def _most(most: int, *, fits: Callable[[int], bool]) -> int:
    """The largest count in 0..most that fits, where fewer always fit too; 0 is known to."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
