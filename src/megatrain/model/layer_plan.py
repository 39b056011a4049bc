"""How each layer is called, looked up once for all calls between two bindings of the outer tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatrain.model.aux import RouterTap
from megatrain.model.blueprint import Blueprint
from megatrain.model.compiled import LayerFunction, compile_kinds
from megatrain.model.experts import ExpertGroups
from megatrain.model.kept_attention import Exchange, begin_exchange
from megatrain.model.sites import Sites


@dataclass(frozen=True)
class LayerPlan:
    """What a call of one layer needs, and the call."""

    module: nn.Module
    sites: Sites
    trainable: tuple[str, ...]  # own parameters, in layout order
    shared_names: tuple[str, ...]  # "stem:..." of stem parameters that the layer reads
    shared_parameters: tuple[Tensor, ...]
    compiled: LayerFunction | None  # None: the module runs as it is
    tap: RouterTap

    def run(
        self, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], *, exchange: Exchange
    ) -> tuple[Tensor, list[Tensor]]:
        """Call the layer with `weights` bound. Returns hidden states and router logits."""
        if self.compiled is not None:
            ordered = tuple(weights[n] for n in self.sites.names)
            out, logits, noted = self.compiled(ordered, args, kwargs, exchange.noting, exchange.given)
            exchange.noted = noted
            return (out[0] if isinstance(out, tuple) else out), logits
        self.sites.put(weights)
        exchange.noted = begin_exchange(noting=exchange.noting, given=exchange.given)
        try:
            out = self.module(*args, **kwargs)
        finally:  # also where there was no memory: the run may be cut smaller, and nothing of this call may stay
            begin_exchange()
            self.sites.clear()
            logits = self.tap.take()
        return (out[0] if isinstance(out, tuple) else out), logits


def plan_layers(
    blueprint: Blueprint,
    *,
    bound: Mapping[str, Tensor],
    groups: Sequence[ExpertGroups | None],
    tiled: bool,
) -> tuple[LayerPlan, ...]:
    """Of every layer. bound: outer tensors by name; those that are trained are parameters of the stem or the tail.

    groups: per layer those of its experts, which then do not come with it; None where it comes whole. tiled: MLPs run
    in tiles.
    """
    anatomy = blueprint.anatomy
    trainable = {entry.name for unit in (anatomy.stem, anatomy.tail) for entry in unit.layout.params}
    compiled = _compiled(blueprint, groups=groups, tiled=tiled)
    return tuple(
        LayerPlan(
            module,
            part.sites if group is None else part.sites.only(entry.name for entry in group.rest.entries),
            tuple(entry.name for entry in (unit.layout if group is None else group.rest).params),
            tuple(f"stem:{n}" for n in part.shared if n in trainable),
            tuple(bound[n] for n in part.shared if n in trainable),
            function,
            blueprint.trial.tap,
        )
        for module, part, unit, function, group in zip(
            blueprint.found.layers, blueprint.parts.layers, anatomy.layers, compiled, groups, strict=True
        )
    )


def never_compiled(blueprint: Blueprint) -> tuple[bool, ...]:
    """Per layer whether it keeps its own module: it shares parameters with others, or hands on state."""
    return tuple(bool(part.shared or blueprint.trial.shared) for part in blueprint.parts.layers)


def _compiled(
    blueprint: Blueprint, *, groups: Sequence[ExpertGroups | None], tiled: bool
) -> tuple[LayerFunction | None, ...]:
    """Layers that stop at their experts keep their own modules too. So do all where MLPs run in tiles."""
    if not blueprint.spec.compile or tiled:
        return (None,) * len(blueprint.found.layers)
    return compile_kinds(
        blueprint.found.layers,
        kinds=blueprint.anatomy.kinds,
        names=[part.sites.names for part in blueprint.parts.layers],
        eager=[never or group is not None for never, group in zip(never_compiled(blueprint), groups, strict=True)],
        tap=blueprint.trial.tap,
    )
