"""Whether what attention gave in the forward waits for the backward, and where.

It saves the recompute of attention: 2 S W FLOP a token and layer, for rows of S tokens and W of attention's width,
beside 2 P of the layer's P parameters. It takes about 2 W bytes a token and layer, as much as a stored input does.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import LOAD_BUFFERS, MemoryPlan, account
from megatrain.plan.job import Job

WORTH_SHARE = 0.1
"""Of a layer's other products: below it attention is recomputed."""
ELEMENT_BYTES = 2
"""Of attention's output, where it can be kept at all."""
PIECE_BYTES = 256
"""`stream.activations.PIECE_BYTES`: the log-sum-exp begins at a multiple of it."""
PACKED_DOCUMENTS = 4
"""A packed row counts as so many documents, which are not known before the data are read."""


def worth(job: Job) -> bool:
    """Whether rows are long enough. Never on the CPU, whose attention is another."""
    known = job.sizes.attention_bytes_per_token
    if not job.sizes.attention_layers or job.on_cpu:
        return False
    length = job.seq_len // PACKED_DOCUMENTS if job.packed else job.seq_len
    return length * (known // ELEMENT_BYTES) >= WORTH_SHARE * layer_params(job.sizes) / len(job.sizes.layers)


def with_attention(chosen: MemoryPlan, *, job: Job, where: str) -> MemoryPlan:
    """`chosen` with attention kept on the "device" or the "host", accounted; "": recomputed."""
    tokens = chosen.micro_batch * chosen.seq_len
    size = tokens * job.sizes.attention_bytes_per_token + PIECE_BYTES if where else 0
    loads = LOAD_BUFFERS if where == "host" else 0
    changed = replace(chosen, attention=where, attention_bytes=size, attention_buffers=loads)
    return account(changed, terms=job.terms(micro_batch=chosen.micro_batch))


def layer_params(sizes: ModelSizes) -> int:
    """Parameters of the layers that a token multiplies with: of experts, those it visits."""
    head = head_params(sizes)
    untied = sizes.tail.elems >= head
    return max(0, sizes.params_active - head * (2 if untied else 1))


def head_params(sizes: ModelSizes) -> int:
    """Of the product with the vocabulary."""
    return sizes.vocab_size * sizes.hidden_numel_per_token
