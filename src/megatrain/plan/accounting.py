"""Bytes by purpose: what the store, the rings and the executor allocate for a plan.

Everything is a sum of sizes that those rooms allocate (a test compares them byte for byte), but for what autograd
and the compiler hold of a layer while it runs: RECOMPUTE_FACTOR and its neighbours were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain.host.pages import BORDER, footprint
from megatrain.model.sizes_types import ModelSizes, UnitSizes
from megatrain.plan.experts import GroupedExperts
from megatrain.plan.hardware import Limit
from megatrain.plan.process import STREAMING_BYTES
from megatrain.plan.slices import SlicedEnds

HEAD_CHUNKS = (4096, 2048, 1024, 512, 256, 128, 64)
"""Tokens whose logits exist at once, best first."""
SLICED_CHUNKS = (16384, 8192, *HEAD_CHUNKS)
"""The same of one slice: its products are small, so more tokens go at once."""
HEAD_SHARE = 0.1
"""The share of the device that the head may take, or what a layer's backward takes if that is more: they alternate."""
CHUNK_LOGIT_BYTES = 8
"""Per bf16 logit of a chunk at the peak: as computed, in fp32, and its gradient."""
COMPILED_LOGIT_BYTES = 4
"""The same where the loss is compiled: as computed, and its gradient."""
WHOLE_LOGIT_BYTES = 16
"""In fp32, and where one chunk takes all rows, the loss is PyTorch's own, with log-softmax kept for the backward."""
RECOMPUTE_FACTOR = 1.5
"""Peak of one layer's backward over what autograd saved for it: 1.41 to 1.45 measured for Llama and Qwen2 layers."""
GROUP_FACTOR = 2.0
"""The same of a group of experts, over what autograd saves for all experts at once: a group passes over every choice of
every token, and masks those that are not its own. 1.70 measured where half of the choices were the group's, 1.95 where
all were (a Mixtral layer in fp32 on a CPU; all experts at once: 1.29)."""
COMPILED_KEPT = 0.65
"""What a kept graph of a compiled layer holds over what autograd would have saved: 0.60 to 0.66 measured on an H200
(Qwen2.5 0.5B to 7B and Llama 8B layers)."""
COMPILED_WIDEST = 6
"""Tensors as wide as the widest product's input that a compiled layer's backward holds at its peak, which is that of a
gated MLP: both projections and their gradients, what goes into the down projection and its gradient."""
COMPILED_BEYOND = 2
"""Where the graph itself is more: gradients of that width beside it."""
POOL_SHARE = 0.125
"""Of what compiled layers' backward takes, what PyTorch's pool takes beyond it: 0.02 to 0.2 measured there. (Of layers
that are not compiled RECOMPUTE_FACTOR has some of it.)"""
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

    @property
    def compiled_layers(self) -> bool:
        """Whether all are, and hold less: which of several kinds is the hungriest is not known here."""
        return self.compiled and not self.sizes.eager_layers


def account(chosen: MemoryPlan, *, terms: Terms) -> MemoryPlan:
    """The plan with both tables filled in, and the head chunk where it is 0."""
    sizes = terms.sizes
    if chosen.head_slices and sizes.slicing is not None:  # of all tokens, and one that only pads
        most = chosen.embedding_rows or terms.batch_tokens + 1
        chosen = replace(chosen, embedding_rows=min(sizes.slicing.embedding_rows, most))
    chosen = replace(chosen, head_chunk=chosen.head_chunk or _head_chunk(chosen, terms=terms))
    device = _device_bytes(chosen, terms=terms)
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


def _device_bytes(chosen: MemoryPlan, *, terms: Terms) -> dict[str, int]:
    sizes = terms.sizes
    outer = (sizes.stem.elems, sizes.tail.elems)
    experts = grouped_experts(chosen, sizes=sizes)
    streamed = experts.layers if experts else sizes.layers[max(0, chosen.resident - 1) :]
    slot = max((u.streamed_bytes for u in streamed), default=0)
    layer_elems, layer_bytes = _largest_gradient(chosen, sizes=sizes)
    ends = sliced_ends(chosen, sizes=sizes)
    weights = sizes.stem.streamed_bytes + sizes.tail.streamed_bytes
    sums = 4 * (layer_elems + (sum(outer) if terms.stem_shared else max(outer)))
    table = {
        "weight slots": chosen.slots * slot,
        "stem and tail": ends.weights if ends else weights,
        "fp32 gradient sums": ends.sums(layer_elems=layer_elems, stem_shared=terms.stem_shared) if ends else sums,
        "gradient buffers": chosen.grad_buffers * layer_bytes,
        "hidden states": 2 * chosen.micro_batches * chosen.input_bytes,
        "activations": _device_inputs(chosen, sizes=sizes),
        "one layer's backward or the head": (passing := _transient_bytes(chosen, terms=terms)),
    }
    if terms.compiled:
        table["PyTorch's pool beyond what is in use"] = int(POOL_SHARE * passing)
    if chosen.attention:
        table["attention outputs"] = _device_attention(chosen, sizes=sizes)
    if ends:
        table["slices of the head"] = ends.places + ends.tables
    if experts:
        tokens = chosen.micro_batch * chosen.seq_len
        waiting = experts.waiting_bytes(step_tokens=chosen.micro_batches * tokens, tokens=tokens)
        table["groups of experts"] = experts.places
        table["what the experts are called with"] = waiting
    if chosen.resident:
        table["resident units"] = _resident_bytes(chosen, terms=terms)
    if chosen.kept:
        tokens = chosen.micro_batches * chosen.micro_batch * chosen.seq_len
        share = COMPILED_KEPT if terms.compiled_layers else 1.0
        table["kept graphs"] = chosen.kept * int(sizes.saved_bytes_per_token * share) * tokens
    return table


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


def _largest_gradient(chosen: MemoryPlan, *, sizes: ModelSizes) -> tuple[int, int]:
    """(elements, bytes as streamed) of the largest that is summed and goes home at once: a layer, or a group."""
    experts = grouped_experts(chosen, sizes=sizes)
    layer = largest(experts.layers if experts else sizes.layers)
    if experts is None:
        return layer.elems, layer.param_bytes
    return max(layer.elems, experts.group_elems), max(layer.param_bytes, experts.group_bytes)


def _transient_bytes(chosen: MemoryPlan, *, terms: Terms) -> int:
    """A layer's recompute, the head's logits and the embedding's gradient never exist at the same time."""
    sizes = terms.sizes
    ends = sliced_ends(chosen, sizes=sizes)
    head = _head_bytes(chosen, terms=terms, chunk=chosen.head_chunk)
    if ends is not None:
        tokens = chosen.micro_batch * chosen.seq_len
        head = ends.head_bytes(
            chunk=min(tokens, chosen.head_chunk),
            step_tokens=tokens * chosen.micro_batches,
            logit_bytes=_logit_bytes(sizes),
        )
        head = max(head, ends.row_block_bytes)
    return max(_backward_bytes(chosen, terms=terms), head)


def _logit_bytes(sizes: ModelSizes) -> int:
    """Per logit of a chunk of a sliced head."""
    return CHUNK_LOGIT_BYTES if sizes.stem.bf16_elems > 0 else WHOLE_LOGIT_BYTES


def _backward_bytes(chosen: MemoryPlan, *, terms: Terms) -> int:
    tokens = chosen.micro_batch * chosen.seq_len
    experts = grouped_experts(chosen, sizes=terms.sizes)
    if experts is not None:  # one after the other; such a layer is not compiled
        layer = experts.known.rest_bytes_per_token * tokens
        group = experts.known.expert_bytes_per_token * tokens
        own = largest(experts.layers).param_bytes
        return max(int(RECOMPUTE_FACTOR * layer) + own, int(GROUP_FACTOR * group) + experts.group_bytes)
    own = largest(terms.sizes.layers).param_bytes
    tiling = terms.sizes.tiling
    if chosen.tile_tokens and tiling is not None:  # such layers are not compiled
        tile = min(tokens, chosen.tile_tokens)
        rest = tiling.rest_bytes_per_token * tokens
        in_tiles = rest + 2 * chosen.input_bytes + int(RECOMPUTE_FACTOR * tiling.mlp_bytes_per_token * tile)
        return own + max(in_tiles + 4 * tiling.elems, int(RECOMPUTE_FACTOR * rest))
    saved, widest = terms.sizes.saved_bytes_per_token, terms.sizes.widest_bytes_per_token
    held = max(COMPILED_WIDEST * widest, COMPILED_KEPT * saved + COMPILED_BEYOND * widest)
    each = held if terms.compiled_layers else RECOMPUTE_FACTOR * saved
    return int(each * tokens) + own


def _head_bytes(chosen: MemoryPlan, *, terms: Terms, chunk: int) -> int:
    sizes = terms.sizes
    tokens = chosen.micro_batch * chosen.seq_len
    in_bf16 = sizes.stem.bf16_elems > 0
    each = COMPILED_LOGIT_BYTES if terms.compiled else CHUNK_LOGIT_BYTES
    logits = chunk * each if tokens > chunk and in_bf16 else min(tokens, chunk) * WHOLE_LOGIT_BYTES
    return logits * sizes.vocab_size + max(sizes.stem.param_bytes, sizes.tail.param_bytes)


def _head_chunk(chosen: MemoryPlan, *, terms: Terms) -> int:
    sizes = terms.sizes
    room = chosen.device_limit.bytes if chosen.device_limit else chosen.host_limit.bytes
    most = max(room * HEAD_SHARE, _backward_bytes(chosen, terms=terms))
    ends = sliced_ends(chosen, sizes=sizes)
    if ends is not None:
        fixed = ends.fixed_bytes(step_tokens=chosen.micro_batch * chosen.micro_batches * chosen.seq_len)
        most = max(room * HEAD_SHARE, _backward_bytes(chosen, terms=terms) - fixed)
        sliced = (c for c in SLICED_CHUNKS if ends.chunk_bytes(c, logit_bytes=_logit_bytes(sizes)) <= most)
        return next(sliced, SLICED_CHUNKS[-1])
    fitting = (chunk for chunk in HEAD_CHUNKS if _head_bytes(chosen, terms=terms, chunk=chunk) <= most)
    return next(fitting, HEAD_CHUNKS[-1])


def largest(layers: Sequence[UnitSizes]) -> UnitSizes:
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
