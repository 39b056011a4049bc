"""One micro-batch through one step: forward layer by layer, tail, backward layer by layer, stem.

A pass owns what Hugging Face's stem computed for it (arguments of every layer, the graph of the embeddings),
the random state before each layer, state that layers hand on beside the hidden states, and router logits.
Weights are arguments: it never keeps a view of a slot. Nothing here asks the device anything.

Letters: A parallel streams (gemma3n), B rows, S positions, D hidden. Hidden states are [B, S, D] or [A, B, S, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatrain.model.attention import Documents
from megatrain.model.batch import MicroBatch
from megatrain.model.handed_on import Given, HandedOn
from megatrain.model.kept_attention import Exchange
from megatrain.model.sliced_tail import HeadSlice, SlicedTail
from megatrain.model.stem import Prepared, StemOutputs
from megatrain.model.stubs import LayerCall
from megatrain.model.tail import Accumulate, TailResult, tail_loss
from megatrain.model.unread import outputs_are_read

if TYPE_CHECKING:
    from megatrain.model.streamed import StreamedModel


@dataclass(frozen=True)
class _Graph:
    """A layer's forward as autograd recorded it: its leaves and its outputs."""

    hidden: Tensor
    own: tuple[Tensor, ...]  # parameters, in `LayerPlan.trainable` order
    leaves: Mapping[int, Tensor]  # of stem outputs, by the id of the value they stand for
    given: Given
    out: Tensor
    logits: list[Tensor]


class Pass:
    """Made by `StreamedModel.begin`. Call order: forward 0..L-1, tail, backward L-1..0, finish."""

    def __init__(
        self,
        model: StreamedModel,
        *,
        batch: MicroBatch,
        calls: Sequence[LayerCall],
        shared: Sequence[str],
        training: bool,
        documents: Documents | None = None,
    ) -> None:
        self.batch = batch
        self.training = training
        self.documents = documents
        self._model = model
        self._stem = StemOutputs(calls[0].hidden)
        self._layers: list[Prepared | None] = list(self._stem.detach(calls, shared=shared))
        self.hidden: Tensor = self._stem.values[0]
        self._rng: list[object | None] = [None] * len(calls)
        self._state = HandedOn(calls, shared=shared)
        self._graphs: dict[int, _Graph] = {}  # of layers whose forward kept it
        self._attention: dict[int, tuple[Tensor, ...]] = {}  # of layers that ran, until `take_attention`
        self.router_logits: list[list[Tensor]] = [[] for _ in calls]
        self.router_gradients: list[list[Tensor | None]] = [[] for _ in calls]

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
        """The layer's output. weights: by entry name, parameters and buffers of the layer.

        keep_graph: run with a graph and keep it for `backward`, which then recomputes nothing; `weights` must stay as
        they are until then. keep_attention: what attention gave is to be had from `take_attention`. attention: what it
        gave in an earlier run of the same.
        """
        model = self._model
        model.enter(self)
        if keep_graph:
            with outputs_are_read():
                graph = self._graphs[layer] = self._with_graph(layer, weights, hidden)
            self._note(layer, given=graph.given, logits=graph.logits)
            return graph.out.detach()
        if model.stochastic and self.training:
            self._rng[layer] = model.rng.get()
        with torch.set_grad_enabled(model.forward_needs_grad[layer]):
            if model.forward_needs_grad[layer]:
                weights = {n: w.detach().requires_grad_(w.is_floating_point()) for n, w in weights.items()}
            given = self._state.give()
            exchange = Exchange(noting=keep_attention and not attention, given=attention)
            out, logits = self._call(layer, weights, hidden.detach(), leaves={}, live=given.live, exchange=exchange)
        if keep_attention:
            self._attention[layer] = attention or tuple(exchange.noted)
        self._note(layer, given=given, logits=logits)
        return out.detach()

    def take_attention(self, layer: int) -> tuple[Tensor, ...]:
        """Once after a forward with keep_attention: what `backward` wants; empty if the layer has no such attention."""
        return self._attention.pop(layer)

    def _note(self, layer: int, *, given: Given, logits: list[Tensor]) -> None:
        """Keep what the layer left beside its output."""
        self._state.take(given)
        if logits:
            self.router_logits[layer] = [t.detach() for t in logits]

    def tail(self, hidden: Tensor, *, denominator: int, chunk: int, grad: bool, accumulate: Accumulate) -> TailResult:
        """Loss of this micro-batch over `denominator` tokens; see `tail_loss`."""
        model = self._model
        model.enter(self)
        return tail_loss(
            model.head,
            hidden=hidden,
            batch=self.batch,
            denominator=denominator,
            chunk=chunk,
            grad=grad,
            accumulate=accumulate,
        )

    def sliced_tail(self, hidden: Tensor, *, denominator: int, chunk: int) -> SlicedTail:
        """The same with the head in slices, `chunk` tokens of a slice's logits at once; see `SlicedTail`."""
        head = self._model.outer.sliced_head
        if head is None:
            raise RuntimeError("the model was not bound for slices")
        mine = replace(head, logits=partial(self._slice_logits, head.logits))
        return SlicedTail(mine, hidden=hidden, batch=self.batch, denominator=denominator, chunk=chunk)

    def _slice_logits(self, logits: Callable[[Tensor, HeadSlice], Tensor], hidden: Tensor, piece: HeadSlice) -> Tensor:
        self._model.enter(self)
        return logits(hidden, piece)

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
        """Recompute the layer with a graph and return the gradients of its input and of its own parameters.

        hidden: the layer's input; None where its graph was kept. attention: of `take_attention`, if it was kept. The
        parameters' gradients are in `layout.params` order, None where no gradient flows. Gradients of stem parameters
        that the layer reads go to `accumulate`.
        """
        self._model.enter(self)
        graph = self._graphs.pop(layer, None)
        if graph is None:
            if hidden is None or self._layers[layer] is None:
                raise RuntimeError(f"layer {layer}: no graph was kept, and no input given or its backward done before")
            if self._rng[layer] is not None:
                self._model.rng.set(self._rng[layer])
            graph = self._with_graph(layer, weights, hidden, exchange=Exchange(given=attention))
        found = self._differentiate(layer, graph, grad, accumulate=accumulate)
        self._layers[layer] = None
        self._rng[layer] = None
        return found

    def _with_graph(
        self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor, *, exchange: Exchange | None = None
    ) -> _Graph:
        """The layer's forward, recorded by autograd, with every input a leaf."""
        prepared = self._prepared(layer)
        leaf = hidden.detach().requires_grad_(True)
        bound, own = dict(weights), []
        for name in self._model.layer_plans[layer].trainable:
            parameter = weights[name].detach().requires_grad_(True)
            bound[name] = parameter
            own.append(parameter)
        values = self._stem.values
        leaves = {id(values[k]): values[k].detach().requires_grad_(True) for k in prepared.externals}
        given = self._state.give_leaves(layer)
        with torch.enable_grad():
            out, logits = self._call(layer, bound, leaf, leaves=leaves, live=given.live, exchange=exchange)
        return _Graph(leaf, tuple(own), leaves, given, out, logits)

    def _differentiate(
        self, layer: int, graph: _Graph, grad: Tensor, *, accumulate: Accumulate
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        plan, stem = self._model.layer_plans[layer], self._stem
        outputs, slopes = [graph.out], [grad]
        self._add_router(layer, graph.logits, outputs, slopes)
        for written, slope in self._state.written(layer, graph.given):
            outputs.append(written)
            slopes.append(slope)
        states = graph.given.leaves.values()
        inputs = [graph.hidden, *graph.own, *plan.shared_parameters, *graph.leaves.values(), *states]
        found = list(torch.autograd.grad(outputs, inputs, slopes, allow_unused=True))
        first = found[0]
        n_own, n_shared, n_ext = len(graph.own), len(plan.shared_parameters), len(graph.leaves)
        rest = found[1 + n_own :]
        for name, gradient in zip(plan.shared_names, rest[:n_shared], strict=True):
            if gradient is not None:
                accumulate(name, gradient)
        externals = self._prepared(layer).externals
        for k, gradient in zip(externals, rest[n_shared : n_shared + n_ext], strict=True):
            stem.add_gradient(k, gradient)
        self._state.add_gradients(graph.given, rest[n_shared + n_ext :])
        return (first if first is not None else torch.zeros_like(graph.hidden)), tuple(found[1 : 1 + n_own])

    def _prepared(self, layer: int) -> Prepared:
        prepared = self._layers[layer]
        if prepared is None:
            raise RuntimeError(f"layer {layer}: called after its backward")
        return prepared

    def finish(self, grad: Tensor, *, accumulate: Accumulate) -> None:
        """Push the gradient of `hidden`, and of all else the layers were given, through the stem. Ends the pass."""
        stem = self._stem
        stem.add_gradient(0, grad)
        pairs = [
            (out, slope)
            for out, slope in zip(stem.outputs, stem.gradients, strict=True)
            if slope is not None and out.requires_grad
        ]
        names, parameters = self._model.outer.stem_names, self._model.outer.stem_parameters
        if pairs and parameters:
            found = torch.autograd.grad([p[0] for p in pairs], parameters, [p[1] for p in pairs], allow_unused=True)
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    accumulate(name, gradient)
        stem.release()
        self._state.release()

    def _call(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        *,
        leaves: Mapping[int, Tensor],
        live: Mapping[str, MutableMapping[Any, Any]],
        exchange: Exchange | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        call = self._prepared(layer).call
        args: tuple[Any, ...] = call.args
        kwargs = dict(call.kwargs)
        if leaves:
            args, kwargs = pytree.tree_map(lambda x: leaves.get(id(x), x), (args, kwargs))
        if live:
            kwargs.update(live)
        if isinstance(call.where, int):
            args = (*args[: call.where], hidden, *args[call.where + 1 :])
        else:
            kwargs[call.where] = hidden
        plan = self._model.layer_plans[layer]
        return plan.run(weights, args, kwargs, exchange=exchange or Exchange())

    def _add_router(self, layer: int, logits: list[Tensor], outputs: list[Tensor], slopes: list[Tensor]) -> None:
        for out, slope in zip(logits, self.router_gradients[layer], strict=False):
            if slope is not None and out.requires_grad:
                outputs.append(out)
                slopes.append(slope)
        self.router_gradients[layer] = []
        self.router_logits[layer] = []
