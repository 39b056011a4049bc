"""Layers as compiled functions: one graph per kind, weights as inputs.

The function that is compiled takes the weights and calls Hugging Face's module with them (`functional_call`
inside), so every layer of a kind and every slot share its graphs. Compiled results are not bit-equal to eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatrain.model.aux import RouterTap
from megatrain.model.experts import Experts, Run, chosen_of
from megatrain.model.kept_attention import begin_exchange

LayerFunction = Callable[
    [tuple[Tensor, ...], tuple[Any, ...], dict[str, Any], bool, tuple[Tensor, ...]],
    tuple[Any, list[Tensor], list[Tensor]],
]
"""(weights, args, kwargs, noting, given) -> (what the layer returns, router logits, noted attention); see Exchange."""
_GRAPHS_PER_KIND = 256
"""With and without gradients, noted and given attention, static and dynamic shapes, one row and several, with and
without masks; and all of these for each length that the longest document is rounded to, a power of two, which the
attention operators take as a constant."""


def compile_kinds(
    layers: Sequence[nn.Module],
    *,
    kinds: Sequence[int],
    names: Sequence[tuple[str, ...]],
    eager: Sequence[bool],
    tap: RouterTap,
) -> tuple[LayerFunction | None, ...]:
    """Per layer the compiled function of its kind; None where `eager` says that the layer must not be compiled.

    Raises the limit of recompilations, which all kinds share, and makes reaching it an error: past it PyTorch
    would run the layers eagerly without a word.
    """
    _limit_graphs(kinds)
    functions: dict[int, LayerFunction] = {}
    found: list[LayerFunction | None] = []
    for layer, kind, own, skip in zip(layers, kinds, names, eager, strict=True):
        if skip:
            found.append(None)
            continue
        if kind not in functions:
            functions[kind] = _compiled(layer, names=own, tap=tap)
        found.append(functions[kind])
    return tuple(found)


def compile_experts(experts: Sequence[Experts | None], *, kinds: Sequence[int]) -> tuple[Run | None, ...]:
    """Per layer what runs a group of its experts, one compiled function per kind of layer; None where it has none."""
    _limit_graphs(kinds)
    runs: dict[int, Run] = {}
    for one, kind in zip(experts, kinds, strict=True):
        if one is not None and kind not in runs:
            runs[kind] = _compiled_experts(one)
    return tuple(None if one is None else runs[kind] for one, kind in zip(experts, kinds, strict=True))


def _limit_graphs(kinds: Sequence[int]) -> None:
    torch._dynamo.config.recompile_limit = _GRAPHS_PER_KIND * (max(kinds) + 1)
    torch._dynamo.config.accumulated_recompile_limit = 8 * _GRAPHS_PER_KIND * (max(kinds) + 1)
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def _compiled_experts(experts: Experts) -> Run:
    """Whose experts these are does not matter: the weights are inputs, and every layer of the kind has these names."""
    own = tuple(name.rpartition(".")[2] for name in experts.names)

    def run(weights: tuple[Tensor, ...], hidden: Tensor, chosen: Tensor, shares: Tensor) -> Any:
        return functional_call(experts.module, dict(zip(own, weights, strict=True)), (hidden, chosen, shares))

    compiled = torch.compile(run)

    def run_group(
        tensors: Mapping[str, Tensor], span: slice, hidden: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        mine, share = chosen_of(span, chosen, weights)
        with experts.being(span.stop - span.start):
            out: Tensor = compiled(tuple(tensors[name] for name in experts.names), hidden, mine, share)
        return out

    return run_group


def _compiled(layer: nn.Module, *, names: tuple[str, ...], tap: RouterTap) -> LayerFunction:
    def run(
        weights: tuple[Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        noting: bool,
        given: tuple[Tensor, ...],
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        noted = begin_exchange(noting=noting, given=given)
        out = functional_call(layer, dict(zip(names, weights, strict=True)), args, kwargs)
        begin_exchange()
        return out, tap.take(), noted

    compiled: LayerFunction = torch.compile(run)
    return compiled
