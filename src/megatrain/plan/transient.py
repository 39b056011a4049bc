"""What the device holds only while one layer's backward or the head runs, in bytes: the two alternate.

The rest of the plan is sums of what is allocated. This is what autograd and the compiler hold: factors were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.experts import GroupedExperts
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
that are not compiled RECOMPUTE_FACTOR has some of it.) Fused experts are tensors so large that a hole for one is as
large as all that: see `pool_bytes`."""


@dataclass(frozen=True)
class Transient:
    """One layer's backward and the head, for micro-batches of a size."""

    sizes: ModelSizes
    tokens: int  # of a micro-batch
    step_tokens: int
    input_bytes: int  # of a micro-batch's hidden states
    tile_tokens: int  # of a tile of the layers' MLPs; 0: they run whole
    compiled: bool  # the loss is, and layers where they can be
    ends: SlicedEnds | None  # None: head and embedding are whole
    experts: GroupedExperts | None  # None: they come with their layer

    @property
    def _compiled_layers(self) -> bool:
        """Whether all are, and hold less: which of several kinds is the hungriest is not known here."""
        return self.compiled and not self.sizes.eager_layers

    @property
    def graph_bytes_per_token(self) -> int:
        """Of one layer's graph, kept from the forward."""
        return int(self.sizes.saved_bytes_per_token * (COMPILED_KEPT if self._compiled_layers else 1.0))

    def pool_bytes(self, *, peak: int) -> int:
        """What PyTorch's pool takes beyond what is in use, of which `peak` comes and goes.

        Where a layer's experts are one tensor, its gradient needs a hole as large as itself between blocks of other
        sizes. An H200's pool held 1.68 GiB beyond what was in use, with a gradient of 1.75 GiB (Mixtral's layers), and
        0.39 with one of 0.44 (groups of two experts), where nothing limited it. Without that room it gives memory back
        and maps it anew at every large block, waiting for the device each time.
        """
        return max(int(POOL_SHARE * peak) if self.compiled else 0, self._largest_expert_bytes)

    @property
    def _largest_expert_bytes(self) -> int:
        """Of the largest tensor that fused experts are, as streamed: all of a layer's, or a group's."""
        known = self.sizes.experts
        if known is None:
            return 0
        return (self.experts or GroupedExperts(self.sizes, known, 1)).largest_bytes

    def peak_bytes(self, *, chunk: int) -> int:
        """A layer's recompute, the head's logits and the embedding's gradient never exist at the same time."""
        if self.ends is None:
            return max(self.backward_bytes, self._head_bytes(chunk))
        head = self.ends.head_bytes(
            chunk=min(self.tokens, chunk),
            step_tokens=self.step_tokens,
            logit_bytes=self._slice_logit_bytes,
        )
        return max(self.backward_bytes, head, self.ends.row_block_bytes)

    @property
    def backward_bytes(self) -> int:
        """Of one layer, the gradients of its own parameters included: as many as the largest has."""
        tokens, sizes = self.tokens, self.sizes
        if self.experts is not None:  # one after the other; such a layer is not compiled
            layer = self.experts.known.rest_bytes_per_token * tokens
            group = self.experts.known.expert_bytes_per_token * tokens
            own = max(u.param_bytes for u in self.experts.layers)
            return max(int(RECOMPUTE_FACTOR * layer) + own, int(GROUP_FACTOR * group) + self.experts.group_bytes)
        own = max(u.param_bytes for u in sizes.layers)
        tiling = sizes.tiling
        if self.tile_tokens and tiling is not None:  # such layers are not compiled
            tile = min(tokens, self.tile_tokens)
            rest = tiling.rest_bytes_per_token * tokens
            in_tiles = rest + 2 * self.input_bytes + int(RECOMPUTE_FACTOR * tiling.mlp_bytes_per_token * tile)
            return own + max(in_tiles + 4 * tiling.elems, int(RECOMPUTE_FACTOR * rest))
        saved, widest = sizes.saved_bytes_per_token, sizes.widest_bytes_per_token
        held = max(COMPILED_WIDEST * widest, COMPILED_KEPT * saved + COMPILED_BEYOND * widest)
        each = held if self._compiled_layers else RECOMPUTE_FACTOR * saved
        return int(each * tokens) + own

    def head_chunk(self, *, room: int) -> int:
        """Tokens whose logits are to exist at once, on a device of `room` bytes."""
        most = max(room * HEAD_SHARE, self.backward_bytes)
        ends = self.ends
        if ends is not None:
            most = max(room * HEAD_SHARE, self.backward_bytes - ends.fixed_bytes(step_tokens=self.step_tokens))
            each = self._slice_logit_bytes
            sliced = (chunk for chunk in SLICED_CHUNKS if ends.chunk_bytes(chunk, logit_bytes=each) <= most)
            return next(sliced, SLICED_CHUNKS[-1])
        fitting = (chunk for chunk in HEAD_CHUNKS if self._head_bytes(chunk) <= most)
        return next(fitting, HEAD_CHUNKS[-1])

    def _head_bytes(self, chunk: int) -> int:
        """Of a whole head."""
        sizes = self.sizes
        each = COMPILED_LOGIT_BYTES if self.compiled else CHUNK_LOGIT_BYTES
        in_chunks = self.tokens > chunk and self._in_bf16
        logits = chunk * each if in_chunks else min(self.tokens, chunk) * WHOLE_LOGIT_BYTES
        return logits * sizes.vocab_size + max(sizes.stem.param_bytes, sizes.tail.param_bytes)

    @property
    def _slice_logit_bytes(self) -> int:
        """Per logit of a chunk of a sliced head."""
        return CHUNK_LOGIT_BYTES if self._in_bf16 else WHOLE_LOGIT_BYTES

    @property
    def _in_bf16(self) -> bool:
        return self.sizes.stem.bf16_elems > 0
