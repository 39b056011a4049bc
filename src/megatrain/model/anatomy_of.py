"""Which unit each tensor of a model belongs to, found by what the autograd graph reaches, not by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.layout import STREAMED_DTYPES, FlatLayout, TensorSpec
from megatrain.model.sites import Site, Sites, persistent_buffers, tensor_sites
from megatrain.model.skeleton import LayerList


@dataclass(frozen=True)
class LayerParts:
    """The tensors of one layer: its own, and those that it shares with the stem (or another layer)."""

    names: tuple[str, ...]  # own tensors, relative to the layer, registration order; parameters then buffers
    tensors: dict[str, Tensor]  # own, on the meta device
    sites: Sites  # of its own tensors
    shared: tuple[str, ...]  # full canonical names of parameters that live in the stem


@dataclass(frozen=True)
class Parts:
    """Every tensor of the model in its place, before stem and tail are told apart."""

    layers: tuple[LayerParts, ...]
    outer: dict[str, Tensor]  # canonical full name -> meta tensor of what is outside the layers or shared by them
    outer_sites: dict[str, list[Site]]
    names: dict[int, tuple[str, ...]]  # id(tensor) -> every full name, canonical first


def parts_of(model: nn.Module, *, found: LayerList) -> Parts:
    """Sort the tensors of `model` (layers still in place) into layers and the rest."""
    sites = tensor_sites(model)
    stateful = {id(t): t for t in model.parameters()} | {id(t): t for t in persistent_buffers(model).values()}
    held = [{id(t) for t in (*layer.parameters(), *layer.buffers())} for layer in found.layers]
    inside = set().union(*held)
    outside = {
        key
        for key, places in sites.items()
        if any(not name.startswith(found.prefix + ".") for name, _ in places) or sum(key in h for h in held) > 1
    }
    names = {key: tuple(name for name, _ in sites[key]) for key in stateful}
    outer = {names[key][0]: tensor for key, tensor in stateful.items() if key in outside or key not in inside}
    outer_sites = {name: [site for _, site in sites[id(tensor)]] for name, tensor in outer.items()}
    outer_ids = {id(t): name for name, t in outer.items()}
    layers = tuple(_layer_parts(layer, outer=outer_ids) for layer in found.layers)
    return Parts(layers, outer, outer_sites, names)


def _layer_parts(layer: nn.Module, *, outer: dict[int, str]) -> LayerParts:
    sites = tensor_sites(layer)
    own: dict[str, Tensor] = {}
    shared: list[str] = []
    for name, tensor in [*layer.named_parameters(), *persistent_buffers(layer).items()]:
        if id(tensor) in outer:
            shared.append(outer[id(tensor)])
        else:
            own[name] = tensor
    places = {name: [site for _, site in sites[id(tensor)]] for name, tensor in own.items()}
    return LayerParts(tuple(own), own, Sites(places), tuple(shared))


def build_anatomy(
    parts: Parts,
    *,
    found: LayerList,
    kinds: tuple[int, ...],
    stem: frozenset[str],
    tail: frozenset[str],
    unused_in_layers: Sequence[frozenset[str]],
) -> Anatomy:
    """Lay the units out. `stem`, `tail`: outer parameters reached from the layers' inputs and from the logits.

    A parameter reached by neither belongs to the tail as unused. Outer buffers and frozen parameters go to the stem.
    """
    across = frozenset(name for layer in parts.layers for name in layer.shared)
    in_stem = {n for n, t in parts.outer.items() if n in stem or n in across or not _trainable(t)}
    stem_unit = _unit(0, "stem", [(n, parts.outer[n]) for n in parts.outer if n in in_stem], names=parts.names)
    layer_units = tuple(
        _unit(i + 1, f"layer {i}", part.tensors.items(), names=parts.names, unused=unused_in_layers[i])
        for i, part in enumerate(parts.layers)
    )
    rest = [(n, t) for n, t in parts.outer.items() if n not in in_stem]
    tail_unit = _unit(
        len(layer_units) + 1, "tail", rest, names=parts.names, unused=frozenset(n for n, _ in rest if n not in tail)
    )
    return Anatomy(
        stem=stem_unit,
        layers=layer_units,
        tail=tail_unit,
        kinds=kinds,
        stem_in_tail=bool(in_stem & tail),
        stem_in_layers=bool(across),
    )


def _trainable(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _unit(
    index: int,
    name: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    names: dict[int, tuple[str, ...]],
    unused: frozenset[str] = frozenset(),
) -> Unit:
    specs = []
    full_names = {}
    for entry, tensor in tensors:
        trainable = _trainable(tensor)
        if trainable and tensor.dtype not in STREAMED_DTYPES:
            full = names[id(tensor)][0]
            raise ModelError(f"parameter {full} has dtype {tensor.dtype}; only bf16 and fp32 can be trained")
        specs.append(TensorSpec(entry, tuple(tensor.shape), tensor.dtype, trainable))
        full_names[entry] = names[id(tensor)]
    return Unit(index, name, FlatLayout.of(specs), full_names, unused)


def hollow(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same shape and dtype that takes no memory (one element, expanded), a leaf for trials."""
    one = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(one, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else one
