"""A plan in plain words: what was chosen, why, and what bounds it."""

from __future__ import annotations

from megatrain.plan.accounting import MemoryPlan, grouped_experts
from megatrain.plan.cutting import USEFUL_TOKENS
from megatrain.plan.job import Job
from megatrain.plan.words import gib, place


def explain(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    """One sentence a decision."""
    told = (_cut, _activations, _attention, _residency, _groups, _tiles, _buffers)
    parts = (*(one(plan, job=job) for one in told), _slices(plan), _bounds(plan))
    return tuple(sentence for part in parts for sentence in part)


def _cut(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    tokens = plan.micro_batch * plan.seq_len
    rows = "1 row" if plan.micro_batch == 1 else f"{plan.micro_batch} rows"
    times = "once" if plan.micro_batches == 1 else f"{plan.micro_batches} times"
    if not isinstance(job.memory.micro_batch, str):
        why = "as memory.micro_batch says"
    elif job.resumed is not None:
        why = "as the run was cut before"
    elif plan.micro_batch == job.batch_size:
        why = "the whole step at once"
    elif plan.micro_batch == 1 and tokens > USEFUL_TOKENS:
        why = "rows are not divided"
    elif (plan.micro_batch + 1) * plan.seq_len > USEFUL_TOKENS:
        why = f"beyond {USEFUL_TOKENS:,} tokens kernels get no faster"
    else:
        why = "the largest that fits, in equal parts"
    return (f"{rows} ({tokens:,} tokens) go through a layer together, {times} a step: {why}",)


def _activations(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    layers = len(job.sizes.layers)
    if plan.activations == "device":
        return (f"the inputs of the {layers} layers wait {place(plan)}: {gib(plan.device['activations'])}",)
    size = gib(plan.host.get("activations", 0))
    reason = "as memory.activations says" if job.memory.activations == "host" else "the device has no room for them"
    return (f"the inputs of the {layers} layers wait in host memory ({size}): {reason}",)


def _attention(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    if not plan.attention:
        return ()
    table, where = (plan.device, "on the device") if plan.attention == "device" else (plan.host, "in host memory")
    return (f"what attention gave waits {where} ({gib(table['attention outputs'])}), so that it is not recomputed",)


def _residency(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    layers = len(job.sizes.layers)
    if plan.resident == 0:
        return (f"all {layers} layers stream through {plan.slots} slots",)
    size = gib(plan.device["resident units"])
    if plan.resident == layers + 2:
        said = [f"every layer, the embedding and the head stay on the device with their optimizer state ({size})"]
    elif plan.resident == layers + 1:
        said = [
            f"every layer and the embedding stay on the device with their optimizer state ({size}); the head streams"
        ]
    elif plan.resident == 1:
        said = [f"the embedding stays on the device with its optimizer state ({size}); all {layers} layers stream"]
    else:
        said = [
            f"the embedding and the first {plan.resident - 1} of {layers} layers stay on the device with their "
            f"optimizer state ({size}); the others stream through {plan.slots} slots"
        ]
    if plan.kept:
        kept = gib(plan.device["kept graphs"])
        said.append(f"the last {plan.kept} layers keep what their backward needs ({kept}) and recompute nothing")
    return tuple(said)


def _groups(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    experts = grouped_experts(plan, sizes=job.sizes)
    if experts is None:
        return ()
    return (
        f"the {experts.known.count} experts of a layer come in {experts.count} groups of {experts.height} "
        f"({gib(experts.group_bytes)}), each for all tokens of the step, because whole layers do not fit; "
        "what comes before the experts runs once more in the forward and in the backward",
    )


def _tiles(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    if not plan.tile_tokens:
        return ()
    return (
        f"MLPs run in tiles of {plan.tile_tokens:,} tokens, because the backward of a whole layer does not fit; "
        "layers are then not compiled",
    )


def _slices(plan: MemoryPlan) -> tuple[str, ...]:
    if not plan.head_slices:
        return ()
    return (
        f"the head comes in {plan.head_slices} slices and the embedding as the rows that a step reads, to make room "
        "for the rows that go through a layer together; it costs one more product with the head",
    )


def _buffers(plan: MemoryPlan, *, job: Job) -> tuple[str, ...]:
    if plan.grad_buffers != 1 or len(job.sizes.layers) == 1:
        return ()
    size = gib(plan.device["gradient buffers"])
    return (f"gradients go home through one buffer ({size}) where two are usual: memory is short",)


def _bounds(plan: MemoryPlan) -> tuple[str, ...]:
    host = f"host memory: {gib(plan.host_total)} of {gib(plan.host_limit.bytes)} ({plan.host_limit.source})"
    if plan.device_limit is None:
        return (host,)
    device = f"device: {gib(plan.device_total)} of {gib(plan.device_limit.bytes)} ({plan.device_limit.source})"
    return (device, host)
