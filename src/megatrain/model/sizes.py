"""A model as the integers that planning needs."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.grouping import Grouping
from megatrain.model.layout import Entry
from megatrain.model.sizes_types import ExpertSizes, ModelSizes, SliceSizes, TileSizes, UnitSizes
from megatrain.model.skeleton import ModelSpec
from megatrain.model.slicing import Slicing
from megatrain.model.tiles import Tiling

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")


def model_sizes(
    spec: ModelSpec,
    *,
    anatomy: Anatomy,
    hidden_shape: tuple[int, ...],
    saved_bytes_per_token: int,
    widest_bytes_per_token: int,
    attention_bytes_per_token: int,
    attention_layers: int,
    eager_layers: int,
    slicing: Slicing | None,
    grouping: Grouping | None,
    tiling: Tiling | None,
) -> ModelSizes:
    """hidden_shape: of one token, [1, 1, D] or [A, 1, 1, D]; the bytes per token: see ModelSizes."""
    entries = [e for unit in anatomy.units for e in unit.layout.entries]
    numel = torch.Size(hidden_shape).numel()
    experts, chosen = _experts(spec.config)
    return ModelSizes(
        stem=_unit(anatomy.stem),
        layers=tuple(_unit(u) for u in anatomy.layers),
        tail=_unit(anatomy.tail),
        hidden_numel_per_token=numel,
        hidden_bytes_per_token=numel * spec.precision.itemsize,
        vocab_size=int(spec.config.vocab_size),
        params_total=sum(e.numel for e in entries if e.trainable),
        params_trainable=sum(e.numel for e in entries if e.trainable),
        params_active=sum(_active(e, experts=experts, chosen=chosen) for e in entries if e.trainable),
        saved_bytes_per_token=saved_bytes_per_token,
        widest_bytes_per_token=widest_bytes_per_token,
        attention_bytes_per_token=attention_bytes_per_token,
        attention_layers=attention_layers,
        eager_layers=eager_layers,
        config_hash=_hash(spec),
        slicing=None if slicing is None else _slices(slicing, anatomy=anatomy),
        tiling=None
        if tiling is None
        else TileSizes(tiling.rest_bytes_per_token, tiling.mlp_bytes_per_token, tiling.elems),
        experts=None if grouping is None else _groupable(grouping, anatomy=anatomy, chosen=chosen),
    )


def _groupable(grouping: Grouping, *, anatomy: Anatomy, chosen: int) -> ExpertSizes:
    pairs = list(zip(grouping.layers, anatomy.layers, strict=True))
    first, layer = next((experts, unit) for experts, unit in pairs if experts is not None)
    entries = [entry for entry in layer.layout.params if entry.name in first.names]
    return ExpertSizes(
        count=first.count,
        chosen=chosen,
        elems=tuple(e.numel // first.count for e in entries),
        itemsizes=tuple(e.dtype.itemsize for e in entries),
        rest=tuple(_unit(unit, without=experts.names if experts is not None else ()) for experts, unit in pairs),
        rest_bytes_per_token=grouping.rest_bytes_per_token,
        expert_bytes_per_token=grouping.expert_bytes_per_token,
    )


def _slices(slicing: Slicing, *, anatomy: Anatomy) -> SliceSizes:
    return SliceSizes(
        head_rows=slicing.head.rows,
        head_width=slicing.head.width,
        embedding_rows=slicing.embedding.rows,
        embedding_width=slicing.embedding.width,
        itemsize=anatomy.stem.layout.entry(slicing.embedding.name).dtype.itemsize,
        tied=int(slicing.tied),
    )


def _unit(unit: Unit, *, without: tuple[str, ...] = ()) -> UnitSizes:
    layout = unit.layout.without(*without) if without else unit.layout
    return UnitSizes(
        name=unit.name,
        elems=layout.elems,
        bf16_elems=layout.bf16_elems,
        streamed_bytes=layout.nbytes,
        param_bytes=layout.param_bytes,
        params=len(layout.params),
    )


def _experts(config: Any) -> tuple[int, int]:
    """How many experts a layer has and how many a token visits; (1, 1) for a dense model."""
    fields = config.to_dict()
    for nested in ("ffn_config",):
        fields |= fields[nested] if isinstance(fields.get(nested), dict) else {}
    experts = next((int(fields[k]) for k in _EXPERTS if isinstance(fields.get(k), int)), 1)
    chosen = next((int(fields[k]) for k in _CHOSEN if isinstance(fields.get(k), int)), experts)
    return max(experts, 1), max(min(chosen, experts), 1)


def _active(entry: Entry, *, experts: int, chosen: int) -> int:
    """Elements a token's forward reads: of stacked expert weights [experts, ...] only the chosen ones."""
    stacked = experts > 1 and len(entry.shape) >= 2 and entry.shape[0] == experts and "expert" in entry.name
    return entry.numel * chosen // experts if stacked else entry.numel


def _hash(spec: ModelSpec) -> str:
    text = spec.config.to_json_string(use_diff=False) + f"|{spec.precision}|{spec.attention}|{spec.training}"
    return hashlib.sha256(text.encode()).hexdigest()
