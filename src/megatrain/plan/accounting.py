"""Bytes by purpose: what the store, the rings and the executor allocate for a plan.

Everything is a sum of sizes that those rooms allocate; nothing is fitted to measurements.

Letters: T tokens of a step (batch_size x seq_len), t tokens of one micro-batch, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.plan.hardware import Limit
from megatrain.plan.sizes import ModelSizes, UnitSizes

HEAD_CHUNKS = (4096, 2048, 1024, 512, 256)
"""Tokens whose logits exist at once, best first."""
HEAD_SHARE = 0.1
"""The share of the device that logits may take before a smaller chunk is preferred."""
LOGIT_BYTES = 16
"""Per logit at the peak: as computed and its gradient (4 each in fp32), in fp32, and one temporary."""
RECOMPUTE_FACTOR = 1.5
"""Backward of one layer: what autograd saved, and half as much again for gradients of its activations."""
RING = 4
"""Micro-batches of one layer's input in flight on the device when activations wait in host memory: 2 out, 2 in."""


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided, and what it takes in bytes by purpose. On the CPU `device` is part of host memory."""

    micro_batch: int  # rows on the device at once
    micro_batches: int  # per step
    seq_len: int
    slots: int
    grad_buffers: int
    activations: str  # "device" | "host"
    head_chunk: int  # tokens whose logits exist at once
    threads: int
    host: dict[str, int]
    device: dict[str, int]
    host_limit: Limit
    device_limit: Limit | None
    on_cpu: bool

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values()) + (self.device_total if self.on_cpu else 0)

    @property
    def fits(self) -> bool:
        on_device = self.device_limit is None or self.device_total <= self.device_limit.bytes
        return on_device and self.host_total <= self.host_limit.bytes


def account(
    chosen: MemoryPlan, *, sizes: ModelSizes, dense_masks: bool, context_bytes: int, process_bytes: int, reserve: int
) -> MemoryPlan:
    """The plan with its head chunk and both tables filled in.

    dense_masks: the attention in use is given a mask of seq_len^2 bytes a row. context_bytes: 0 on the CPU.
    process_bytes: what the process holds before it allocates. reserve: left to the system.
    """
    room = chosen.device_limit.bytes if chosen.device_limit else chosen.host_limit.bytes
    chunk = next((c for c in HEAD_CHUNKS if c * sizes.vocab_size * LOGIT_BYTES <= room * HEAD_SHARE), HEAD_CHUNKS[-1])
    chosen = replace(chosen, head_chunk=chunk)
    device = _device_bytes(chosen, sizes=sizes)
    if dense_masks:
        device["attention masks"] = chosen.micro_batch * chosen.micro_batches * chosen.seq_len**2
    host = host_bytes(sizes)
    if chosen.activations == "host":
        host["activations"] = _activation_bytes(chosen, sizes=sizes)
    host["this process so far"] = process_bytes
    extra = {"context and workspaces": context_bytes} if context_bytes else {}
    kept = {"left to the system": reserve} if reserve else {}
    return replace(chosen, host=host | kept, device=device | extra)


def host_bytes(sizes: ModelSizes) -> dict[str, int]:
    """The store: every unit's streamed half, the rest of its master, two moments, a gradient slab, step counts."""
    units = (sizes.stem, *sizes.layers, sizes.tail)
    return {
        "weights as streamed": sum(u.streamed_bytes for u in units),
        "low halves of the masters": sum(2 * u.bf16_elems for u in units),
        "optimizer moments": sum(8 * u.elems for u in units),
        "gradients": sum(u.param_bytes for u in units),
        "step counts": sum(8 * u.params for u in units),
    }


def _activation_bytes(chosen: MemoryPlan, *, sizes: ModelSizes) -> int:
    tokens = chosen.micro_batch * chosen.micro_batches * chosen.seq_len
    return len(sizes.layers) * tokens * sizes.hidden_bytes_per_token


def _device_bytes(chosen: MemoryPlan, *, sizes: ModelSizes) -> dict[str, int]:
    outer = (sizes.stem, sizes.tail)
    layer = _largest(sizes.layers)
    micro_tokens = chosen.micro_batch * chosen.seq_len
    step_tokens = micro_tokens * chosen.micro_batches
    waiting = (
        _activation_bytes(chosen, sizes=sizes)
        if chosen.activations == "device"
        else RING * micro_tokens * sizes.hidden_bytes_per_token
    )
    # a layer's recompute and the head's chunks never exist at the same time
    recompute = int(RECOMPUTE_FACTOR * sizes.saved_bytes_per_token * micro_tokens) + layer.param_bytes
    head = min(chosen.head_chunk, micro_tokens) * sizes.vocab_size * LOGIT_BYTES + max(u.param_bytes for u in outer)
    return {
        "weight slots": chosen.slots * layer.streamed_bytes,
        "stem and tail": sum(u.streamed_bytes for u in outer),
        "fp32 gradient sums": 4 * (layer.elems + sum(u.elems for u in outer)),
        "gradient buffers": chosen.grad_buffers * layer.param_bytes,
        "hidden states": 2 * step_tokens * sizes.hidden_bytes_per_token,
        "activations": waiting,
        "one layer's backward or the head": max(recompute, head),
    }


def _largest(layers: tuple[UnitSizes, ...]) -> UnitSizes:
    """No layer has more of anything than this made-up one: layers of several kinds share slots and buffers."""
    return replace(
        layers[0],
        name="largest layer",
        elems=max(u.elems for u in layers),
        bf16_elems=max(u.bf16_elems for u in layers),
        streamed_bytes=max(u.streamed_bytes for u in layers),
        param_bytes=max(u.param_bytes for u in layers),
        params=max(u.params for u in layers),
    )
