"""Bytes by purpose: what the store, the rings and the executor allocate for a plan.

Everything is a sum of sizes that those rooms allocate (a test compares them byte for byte), but for what autograd
and the compiler hold of a layer while it runs, whose factors were measured (transient.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain.host.pages import BORDER, footprint
from megatrain.model.sizes_types import ModelSizes, UnitSizes
from megatrain.plan.experts import GroupedExperts
from megatrain.plan.hardware import Limit
from megatrain.plan.process import STREAMING_BYTES
from megatrain.plan.slices import SlicedEnds
from megatrain.plan.transient import Transient

LOAD_BUFFERS = 2
"""Inputs on their way back to the device when activations wait in host memory."""
SENDS_IN_FLIGHT = 2
"""Inputs on their way out, whose memory the device still holds."""
TOKEN_BYTES = 4 * 8
"""Of a token of the running step: its number, label, position and mask, as the loader hands them out."""


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided, and what it takes in bytes by purpose. On the CPU `device` is part of host memory."""

    micro_batch: int  # rows on the device at once
    micro_batches: int  # per step
    seq_len: int
    slots: int
    grad_buffers: int
    activations: str  # "device" | "host"
    load_buffers: int  # inputs being read back at once; 0: activations stay on the device
    input_bytes: int  # of one micro-batch's hidden states
    head_chunk: int  # tokens whose logits exist at once
    threads: int
    host: dict[str, int]
    device: dict[str, int]
    host_limit: Limit
    device_limit: Limit | None
    on_cpu: bool
    resident: int = 0  # units, from the stem on, that stay on the device with their optimizer state
    kept: int = 0  # layers, from the last, whose forward keeps its graph for the backward
    head_slices: int = 0  # the head comes in so many slices, and the embedding as rows; 0: both whole
    embedding_rows: int = 0  # with slices: the most distinct tokens of a step
    attention: str = ""  # what attention gave waits for the backward on the "device" or the "host"; "": recomputed
    attention_bytes: int = 0  # of one layer and micro-batch, at most
    attention_buffers: int = 0  # of it on its way back; 0 unless it waits on the host
    tile_tokens: int = 0  # of a tile of the layers' MLPs; 0: they run whole
    expert_groups: int = 0  # a layer's experts come in at most so many groups; 0: with their layer

    @property
    def device_total(self) -> int:
        return sum(self.device.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values()) + (self.device_total if self.on_cpu else 0)

    @property
    def fits(self) -> bool:
        return self.device_fits and self.host_total <= self.host_limit.bytes

    @property
    def device_fits(self) -> bool:
        return self.device_limit is None or self.device_total <= self.device_limit.bytes

    @property
    def pinned_bytes(self) -> int:
        """What the device copies from and to, and is to be page-locked."""
        wanted = ("weights as streamed", "gradients", "activations", "attention outputs", "embedding rows")
        return sum(self.host.get(purpose, 0) for purpose in wanted)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint's manifest keeps them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemoryPlan:
        """The plan that `to_dict` described: a resumed run is cut as it was."""
        limits = {key: None if values[key] is None else Limit(**values[key]) for key in ("host_limit", "device_limit")}
        return cls(**{**values, **limits})


@dataclass(frozen=True)
class Terms:
    """What the tables depend on beside the plan.

    stem_shared: the tail or the layers read stem tensors too, so that its gradient sum lives beside theirs.
    dense_masks: the attention in use is given a mask of seq_len^2 bytes a row. context_bytes: 0 on the CPU.
    process_bytes: what the process holds before it allocates; libraries_bytes: what it will hold beyond that of code
    and compiler. reserve: left to the system. moment_bytes: per element of each of the optimizer's two moments.
    batch_tokens: of one step, padding included. compiled: the loss is compiled, and layers where they can be.
    """

    sizes: ModelSizes
    stem_shared: bool
    dense_masks: bool
    context_bytes: int
    process_bytes: int
    libraries_bytes: int
    reserve: int
    moment_bytes: int
    batch_tokens: int
    compiled: bool = False


def account(chosen: MemoryPlan, *, terms: Terms) -> MemoryPlan:
    """The plan with both tables filled in, and the head chunk where it is 0."""
    sizes = terms.sizes
    if chosen.head_slices and sizes.slicing is not None:  # of all tokens, and one that only pads
        most = chosen.embedding_rows or terms.batch_tokens + 1
        chosen = replace(chosen, embedding_rows=min(sizes.slicing.embedding_rows, most))
    passing = _transient(chosen, terms=terms)
    if not chosen.head_chunk:
        room = chosen.device_limit or chosen.host_limit
        chosen = replace(chosen, head_chunk=passing.head_chunk(room=room.bytes))
    device = _device_bytes(chosen, terms=terms, passing=passing)
    if terms.dense_masks:
        device["attention masks"] = chosen.micro_batch * chosen.micro_batches * chosen.seq_len**2
    if terms.context_bytes:
        device["context and workspaces"] = terms.context_bytes
    host = host_bytes(sizes, moment_bytes=terms.moment_bytes)
    if chosen.activations == "host":
        host["activations"] = _waiting_rows(chosen, sizes=sizes) * footprint(chosen.input_bytes, pinned=True)
    if chosen.attention == "host":
        rows = sizes.attention_layers * chosen.micro_batches
        host["attention outputs"] = rows * footprint(chosen.attention_bytes, pinned=True)
    ends = sliced_ends(chosen, sizes=sizes)
    if ends is not None:
        host["embedding rows"] = footprint(ends.row_block_bytes, pinned=True)
    copies = 1 if chosen.on_cpu else 2  # a page-locked one for the way to the device
    host["rows of the step"] = copies * TOKEN_BYTES * terms.batch_tokens
    host["this process so far"] = terms.process_bytes
    if terms.libraries_bytes:
        host["libraries and compiler"] = terms.libraries_bytes
    if _streams(chosen, sizes=sizes) and terms.libraries_bytes and not chosen.on_cpu:
        host["the driver's part of streaming"] = STREAMING_BYTES
    if terms.reserve:
        host["left to the system"] = terms.reserve
    return replace(chosen, host=host, device=device)


def _streams(chosen: MemoryPlan, *, sizes: ModelSizes) -> bool:
    return chosen.resident < len(units_of(sizes)) or chosen.load_buffers + chosen.attention_buffers > 0


# --- host and disk ---------------------------------------------------------------------------------------


def units_of(sizes: ModelSizes) -> tuple[UnitSizes, ...]:
    """In the order of the store."""
    return (sizes.stem, *sizes.layers, sizes.tail)


def host_bytes(sizes: ModelSizes, *, moment_bytes: int = 4) -> dict[str, int]:
    """The store: every unit's streamed half, the rest of its master, two moments, a gradient slab, step counts."""
    units = units_of(sizes)
    return {
        "weights as streamed": sum(footprint(u.streamed_bytes, pinned=True) for u in units) + BORDER,
        "low halves of the masters": sum(footprint(2 * u.bf16_elems, pinned=False) for u in units),
        "optimizer moments": sum(footprint(2 * moment_bytes * u.elems, pinned=False) for u in units),
        "gradients": sum(footprint(u.param_bytes, pinned=True) for u in units),
        "step counts": sum(8 * u.params for u in units),
    }


def checkpoint_bytes(sizes: ModelSizes, *, moment_bytes: int = 4) -> int:
    """Bytes of tensors in one checkpoint: all of the store but the gradients."""
    return sum(u.streamed_bytes + 2 * u.bf16_elems + 2 * moment_bytes * u.elems + 8 * u.params for u in units_of(sizes))


def _waiting_rows(chosen: MemoryPlan, *, sizes: ModelSizes) -> int:
    """How many stored inputs there are: one of each layer and micro-batch."""
    return len(sizes.layers) * chosen.micro_batches


# --- device ----------------------------------------------------------------------------------------------


def _device_bytes(chosen: MemoryPlan, *, terms: Terms, passing: Transient) -> dict[str, int]:
    sizes, ends, experts = terms.sizes, passing.ends, passing.experts
    outer = (sizes.stem.elems, sizes.tail.elems)
    streamed = experts.layers if experts else sizes.layers[max(0, chosen.resident - 1) :]
    slot = max((u.streamed_bytes for u in streamed), default=0)
    layer_elems, layer_bytes = _largest_gradient(experts, sizes=sizes)
    weights = sizes.stem.streamed_bytes + sizes.tail.streamed_bytes
    sums = 4 * (layer_elems + (sum(outer) if terms.stem_shared else max(outer)))
    table = {
        "weight slots": chosen.slots * slot,
        "stem and tail": ends.weights if ends else weights,
        "fp32 gradient sums": ends.sums(layer_elems=layer_elems, stem_shared=terms.stem_shared) if ends else sums,
        "gradient buffers": chosen.grad_buffers * layer_bytes,
        "hidden states": 2 * chosen.micro_batches * chosen.input_bytes,
        "activations": _device_inputs(chosen, sizes=sizes),
        "one layer's backward or the head": (peak := passing.peak_bytes(chunk=chosen.head_chunk)),
    }
    beyond = passing.pool_bytes(peak=peak)
    if beyond and (terms.compiled or terms.context_bytes):
        table["PyTorch's pool beyond what is in use"] = beyond
    if chosen.attention:
        table["attention outputs"] = _device_attention(chosen, sizes=sizes)
    if ends:
        table["slices of the head"] = ends.places + ends.tables
    if experts:
        waiting = experts.waiting_bytes(step_tokens=passing.step_tokens, tokens=passing.tokens)
        table["groups of experts"] = experts.places
        table["what the experts are called with"] = waiting
    if chosen.resident:
        table["resident units"] = _resident_bytes(chosen, terms=terms)
    if chosen.kept:
        table["kept graphs"] = chosen.kept * passing.graph_bytes_per_token * passing.step_tokens
    return table


def _transient(chosen: MemoryPlan, *, terms: Terms) -> Transient:
    tokens = chosen.micro_batch * chosen.seq_len
    return Transient(
        sizes=terms.sizes,
        tokens=tokens,
        step_tokens=chosen.micro_batches * tokens,
        input_bytes=chosen.input_bytes,
        tile_tokens=chosen.tile_tokens,
        compiled=terms.compiled,
        ends=sliced_ends(chosen, sizes=terms.sizes),
        experts=grouped_experts(chosen, sizes=terms.sizes),
    )


def _device_inputs(chosen: MemoryPlan, *, sizes: ModelSizes) -> int:
    if chosen.activations == "device":
        return _waiting_rows(chosen, sizes=sizes) * chosen.input_bytes
    return (chosen.load_buffers + SENDS_IN_FLIGHT) * chosen.input_bytes


def _device_attention(chosen: MemoryPlan, *, sizes: ModelSizes) -> int:
    """A layer whose graph is kept holds its own."""
    if chosen.attention == "device":
        recomputed = min(sizes.attention_layers, len(sizes.layers) - chosen.kept)
        return recomputed * chosen.micro_batches * chosen.attention_bytes
    return (chosen.attention_buffers + SENDS_IN_FLIGHT) * chosen.attention_bytes


def _resident_bytes(chosen: MemoryPlan, *, terms: Terms) -> int:
    """Masters, moments and gradients of the first units; the weights of stem and tail are counted as such already."""
    units = units_of(terms.sizes)[: chosen.resident]
    weights = sum(u.streamed_bytes for u in terms.sizes.layers[: max(0, chosen.resident - 1)])
    return weights + sum(2 * u.bf16_elems + 2 * terms.moment_bytes * u.elems + u.param_bytes for u in units)


def sliced_ends(chosen: MemoryPlan, *, sizes: ModelSizes) -> SlicedEnds | None:
    """What a head in slices takes; None where it comes whole."""
    if not chosen.head_slices or sizes.slicing is None:
        return None
    return SlicedEnds(sizes, sizes.slicing, chosen.head_slices, chosen.embedding_rows)


def grouped_experts(chosen: MemoryPlan, *, sizes: ModelSizes) -> GroupedExperts | None:
    """What experts in groups take; None where they come with their layer."""
    if sizes.experts is None or not chosen.expert_groups:
        return None
    return GroupedExperts(sizes, sizes.experts, chosen.expert_groups)


def _largest_gradient(experts: GroupedExperts | None, *, sizes: ModelSizes) -> tuple[int, int]:
    """(elements, bytes as streamed) of the largest that is summed and goes home at once: a layer, or a group.

    Layers of several kinds share sum and buffers: what is largest in any of them counts.
    """
    layers = experts.layers if experts else sizes.layers
    elems, streamed = max(u.elems for u in layers), max(u.param_bytes for u in layers)
    if experts is None:
        return elems, streamed
    return max(elems, experts.group_elems), max(streamed, experts.group_bytes)
