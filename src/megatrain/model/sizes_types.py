"""The numbers about a model that planning needs, as plain integers (this file imports no torch)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitSizes:
    """One unit (stem, layer or tail) as its flat layout counts it."""

    name: str
    elems: int  # places in per-element tensors, alignment included
    bf16_elems: int
    streamed_bytes: int  # parameters and buffers, as they cross the link
    param_bytes: int  # parameters only: the size of a gradient slab
    params: int  # how many parameter tensors


@dataclass(frozen=True)
class SliceSizes:
    """Of a model whose head can come in slices and whose embedding as rows (model/slicing.py): [rows, width] each."""

    head_rows: int
    head_width: int
    embedding_rows: int
    embedding_width: int
    itemsize: int  # bytes per element of both
    tied: int  # 1: one tensor is both; 0


@dataclass(frozen=True)
class ExpertSizes:
    """Of a model whose layers' experts can come in groups (model/grouping.py)."""

    count: int  # experts of a layer that has some
    chosen: int  # of them, by a token
    elems: tuple[int, ...]  # of one expert, by parameter
    itemsizes: tuple[int, ...]  # bytes per element of each, as streamed
    rest: tuple[UnitSizes, ...]  # every layer without its experts
    rest_bytes_per_token: int  # what autograd keeps for the backward of the hungriest layer without its experts
    expert_bytes_per_token: int  # and for that of a layer's experts alone


@dataclass(frozen=True)
class TileSizes:
    """Of a model whose MLPs can run in tiles (model/tiles.py)."""

    rest_bytes_per_token: int  # what autograd keeps of the hungriest layer without its MLP
    mlp_bytes_per_token: int  # and of the MLP
    elems: int  # of the largest MLP


@dataclass(frozen=True)
class ModelSizes:
    """`saved_bytes_per_token`: what autograd keeps for the backward of the hungriest layer, weights excluded.

    It counts memory that grows with the tokens; attention matrices (eager attention, dense masks) are extra.
    `widest_bytes_per_token`: what the widest product of a layer takes in. `attention_bytes_per_token`: what the
    attention of a layer gives, output and log-sum-exp, where that can wait for the backward: in `attention_layers` of
    them.
    """

    stem: UnitSizes
    layers: tuple[UnitSizes, ...]
    tail: UnitSizes
    hidden_numel_per_token: int
    hidden_bytes_per_token: int
    vocab_size: int
    params_total: int
    params_trainable: int
    params_active: int
    saved_bytes_per_token: int
    config_hash: str
    slicing: SliceSizes | None = None  # None: head and embedding can only come whole
    experts: ExpertSizes | None = None  # None: there are none, or they can only come with their layer
    tiling: TileSizes | None = None  # None: layers can only run whole
    widest_bytes_per_token: int = 0
    attention_bytes_per_token: int = 0
    attention_layers: int = 0
    eager_layers: int = 0  # that are never compiled: they hand on state, or share parameters


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs of a model beside its sizes. Plain values, so that they can be kept on disk."""

    sizes: ModelSizes
    model_type: str
    stem_shared: bool  # the tail or the layers read tensors of the stem (a tied head)
    dense_masks: bool  # the attention in use takes a mask of S^2 a row
    attention: str  # as Hugging Face calls it
    max_positions: int | None  # the longest sequence it knows
