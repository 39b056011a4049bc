"""A pass through layers whose experts come in groups.

A layer is run up to its experts (`route`), its groups of experts add up what they give (`mix`), and the layer is run
again with the sum (`forward`). Backwards likewise: the layer down to the gradient of that sum (`reroute`), the groups
again for their own gradients and those of what they were called with (`unmix`), then the layer (`backward`), in whose
graph the experts stand for gradients that are known. So a group may come and go while all micro-batches wait for it.
Our own attention, once on the way to the experts, does not run again (kept_attention.py).

What groups give is summed in fp32, one group after the other; a layer in one piece sums in the order of a token's
choices. With two choices a token the bits are the same in fp32.

Letters: T tokens of a pass, D hidden, K experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.model.experts import ExpertGroups
from megatrain.model.kept_attention import Exchange, begin_exchange
from megatrain.model.passes import Pass
from megatrain.model.tail import Accumulate


class _Reached(Exception):
    """The layer has come to its experts."""


@dataclass
class _Routed:
    """What the experts of a layer are called with in one pass, and what became of it so far."""

    hidden: Tensor  # [T, D]
    chosen: Tensor  # [T, K]
    weights: Tensor  # [T, K]
    total: Tensor | None = None  # fp32 [T, D]: what the groups gave so far
    slope: Tensor | None = None  # [T, D]: the gradient of their sum
    hidden_grad: Tensor | None = None  # fp32 [T, D], of all groups so far
    weights_grad: Tensor | None = None  # fp32 [T, K]
    attention: tuple[Tensor, ...] = ()  # what attention gave on the way to the experts, so that it does not run again

    @classmethod
    def of(cls, hidden: Tensor, chosen: Tensor, weights: Tensor, *, attention: Sequence[Tensor]) -> _Routed:
        return cls(hidden.detach(), chosen.detach(), weights.detach(), attention=tuple(attention))


class _KnownExperts(torch.autograd.Function):
    """Experts whose gradients are known. What they give is read by nobody."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, routed: _Routed) -> Tensor:
        ctx.routed, ctx.dtypes = routed, (hidden.dtype, weights.dtype)
        return hidden.new_zeros(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None]:
        routed: _Routed = ctx.routed
        found = (routed.hidden_grad, routed.weights_grad)
        needed = zip(found, ctx.dtypes, ctx.needs_input_grad, strict=False)
        hidden, weights = (None if g is None or not needs else g.to(dtype) for g, dtype, needs in needed)
        return hidden, weights, None


class ExpertPass(Pass):
    """Made by `StreamedModel.begin` where the experts are divided. A layer without any is run as ever.

    Of the others the call order is: route, mix of every group, forward; reroute, unmix of every group, backward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls: dict[int, _Routed] = {}  # by layer, while its groups pass

    def _routed(self, layer: int) -> _Routed:
        found = self._calls.get(layer)
        if found is None:
            raise RuntimeError(f"layer {layer}: its experts were not reached in this pass")
        return found

    def _groups(self, layer: int) -> ExpertGroups:
        groups = self._model.expert_groups[layer]
        assert groups is not None
        return groups

    def route(self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor) -> None:
        """Run the layer up to its experts. weights: of the layer without them."""
        model = self._model
        model.enter(self)
        if model.stochastic and self.training:
            self._rng[layer] = model.rng.get()

        exchange = Exchange(noting=True)

        def leave(*call: Tensor) -> Tensor:
            self._calls[layer] = _Routed.of(*call, attention=exchange.noted)
            raise _Reached

        with torch.no_grad(), self._groups(layer).experts.call.answering(leave):
            try:
                self._call(layer, weights, hidden.detach(), leaves={}, live={}, exchange=exchange)
            except _Reached:
                return
        raise RuntimeError(f"layer {layer} ended without calling its experts")

    def mix(self, layer: int, group: int, tensors: Mapping[str, Tensor]) -> None:
        """Add what one group of experts gives. tensors: its rows of the experts' parameters."""
        self._model.enter(self)
        groups, routed = self._groups(layer), self._routed(layer)
        with torch.no_grad():
            given = groups.run(tensors, groups.spans[group], routed.hidden, routed.chosen, routed.weights)
            routed.total = given.float() if routed.total is None else routed.total.add_(given)

    def forward(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        *,
        keep_graph: bool = False,
        keep_attention: bool = False,
        attention: tuple[Tensor, ...] = (),
    ) -> Tensor:
        groups = self._model.expert_groups[layer]
        if groups is None:
            return super().forward(
                layer, weights, hidden, keep_graph=keep_graph, keep_attention=keep_attention, attention=attention
            )
        routed, rng = self._calls.pop(layer), self._rng[layer]
        if rng is not None:
            self._model.rng.set(rng)

        def give(called_with: Tensor, *_: Tensor) -> Tensor:
            assert routed.total is not None
            return routed.total.to(called_with.dtype)

        with groups.experts.call.answering(give):
            return super().forward(
                layer, weights, hidden, keep_attention=keep_attention, attention=attention or routed.attention
            )

    def reroute(self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor, grad: Tensor) -> None:
        """Run the layer again, for what its experts are called with and the gradient of what they give."""
        model = self._model
        model.enter(self)
        if self._rng[layer] is not None:
            model.rng.set(self._rng[layer])
        leaf: list[Tensor] = []
        exchange = Exchange(noting=True)

        def stand_in(*call: Tensor) -> Tensor:
            routed = _Routed.of(*call, attention=exchange.noted)
            begin_exchange()  # attention behind the experts has a graph, which noting would cut
            self._calls[layer] = routed
            leaf.append(torch.zeros_like(routed.hidden).requires_grad_(True))  # the only leaf: no graph before it
            return leaf[0]

        with torch.enable_grad(), self._groups(layer).experts.call.answering(stand_in):
            out, _ = self._call(layer, weights, hidden.detach(), leaves={}, live={}, exchange=exchange)
        (self._routed(layer).slope,) = torch.autograd.grad(out, leaf, grad)

    def unmix(self, layer: int, group: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Recompute one group with a graph: the gradients of its parameters, in the order of the group's layout."""
        self._model.enter(self)
        groups, routed = self._groups(layer), self._routed(layer)
        hidden, weights = (t.detach().requires_grad_(True) for t in (routed.hidden, routed.weights))
        own = {entry.name: tensors[entry.name].detach().requires_grad_(True) for entry in groups.layouts[group].params}
        with torch.enable_grad():
            given = groups.run(own, groups.spans[group], hidden, routed.chosen, weights)
        slope = routed.slope
        assert slope is not None
        of_hidden, of_weights, *found = torch.autograd.grad(given, [hidden, weights, *own.values()], slope)
        if routed.hidden_grad is None or routed.weights_grad is None:
            routed.hidden_grad, routed.weights_grad = of_hidden.float(), of_weights.float()
        else:
            routed.hidden_grad.add_(of_hidden)
            routed.weights_grad.add_(of_weights)
        return tuple(found)

    def backward(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor | None,
        grad: Tensor,
        *,
        accumulate: Accumulate,
        attention: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        groups = self._model.expert_groups[layer]
        if groups is None:
            return super().backward(layer, weights, hidden, grad, accumulate=accumulate, attention=attention)
        routed = self._calls.pop(layer)

        def known(called_with: Tensor, _: Tensor, shares: Tensor) -> Tensor:
            out: Tensor = _KnownExperts.apply(called_with, shares, routed)  # type: ignore[no-untyped-call]
            return out

        with groups.experts.call.answering(known):
            return super().backward(
                layer, weights, hidden, grad, accumulate=accumulate, attention=attention or routed.attention
            )
