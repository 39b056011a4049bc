"""A model small enough to see through, with the interface that the executor uses.

embedding [V, D] (stem), L layers y = x + x * w (w: [D]), head [V, D] (tail, or the embedding when tied). With experts
a layer is y = x + x * w + x * (sum of e) with e: [E, D], and in front of it may stand one without.
Letters: V vocabulary, D hidden size, B rows, S positions, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.layout import FlatLayout, TensorSpec
from megatrain.model.sliced_tail import HeadSlice, SliceableHead, SlicedTail

V, D, B, S = 11, 4, 2, 5


def toy_anatomy(layers: int, *, tied: bool, experts: int = 0, dtype: torch.dtype = torch.float32) -> Anatomy:
    """With experts, all layers but the first of several have some."""

    def unit(index: int, name: str, *specs: tuple[str, tuple[int, ...]]) -> Unit:
        layout = FlatLayout.of(TensorSpec(n, shape, dtype, True) for n, shape in specs)
        return Unit(index, name, layout, {n: (n,) for n, _ in specs}, frozenset())

    stem = unit(0, "stem", ("embed", (V, D)))
    own = [
        [("w", (D,)), *([("e", (experts, D))] if experts and i >= min(1, layers - 1) else [])] for i in range(layers)
    ]
    middle = tuple(unit(i + 1, f"layer {i}", *specs) for i, specs in enumerate(own))
    tail = unit(layers + 1, "tail", ("norm", (D,)), *([] if tied else [("head", (V, D))]))
    return Anatomy(stem, middle, tail, (0,) * layers, tied, False)


@dataclass(frozen=True)
class ToyExperts:
    names: tuple[str, ...]


@dataclass(frozen=True)
class ToyGroups:
    """What the executor asks of model/experts.py."""

    experts: ToyExperts
    rest: FlatLayout
    spans: tuple[slice, ...]
    layouts: tuple[FlatLayout, ...]

    @classmethod
    def of(cls, layout: FlatLayout, *, count: int) -> ToyGroups:
        entry = layout.entry("e")
        height = -(-entry.shape[0] // count)
        spans = [slice(at, min(at + height, entry.shape[0])) for at in range(0, entry.shape[0], height)]
        parts = [FlatLayout.of([TensorSpec("e", (s.stop - s.start, D), entry.dtype, True)]) for s in spans]
        return cls(ToyExperts(("e",)), layout.without("e"), tuple(spans), tuple(parts))


@dataclass
class ToyRouted:
    hidden: Tensor
    slope: Tensor | None = None
    sum: Tensor | None = None  # forward: of what groups give; backward: of the gradients of `hidden`


@dataclass(frozen=True)
class ToyMatrix:
    name: str
    rows: int


@dataclass(frozen=True)
class ToySlicing:
    """What the executor asks of model/slicing.py."""

    head: ToyMatrix
    embedding: ToyMatrix
    tied: bool
    bias: None = None
    padding: None = None


class ToySlices:
    """What the executor asks of model/rows_and_slices.py."""

    table: Tensor

    def look_up(self, table: Tensor, *, padding: int | None) -> None:
        assert padding is None
        self.table = table

    @staticmethod
    def slice_at(first: int, weight: Tensor) -> HeadSlice:
        return HeadSlice(first, weight.detach().requires_grad_(), None)


@dataclass(frozen=True)
class ToyTail:
    loss: Tensor
    hidden_grad: Tensor | None


class ToyPass:
    def __init__(self, model: ToyModel, batch: MicroBatch, *, grad: bool) -> None:
        self._model, self._batch = model, batch
        with torch.set_grad_enabled(grad):
            ids = batch.input_ids if model.slices is None else model.slices.table[batch.input_ids]
            self._graph = model.stem["embed"][ids]
        self.hidden = self._graph.detach()
        self._kept: dict[int, tuple[Tensor, list[Tensor], Tensor]] = {}
        self._routed: dict[int, ToyRouted] = {}
        self._attention: dict[int, tuple[Tensor, ...]] = {}

    def route(self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor) -> None:
        assert set(weights) == {"w"}
        self._routed[layer] = ToyRouted(hidden)

    def reroute(self, layer: int, weights: Mapping[str, Tensor], hidden: Tensor, grad: Tensor) -> None:
        assert set(weights) == {"w"}
        self._routed[layer] = ToyRouted(hidden.clone(), grad)

    def mix(self, layer: int, group: int, tensors: Mapping[str, Tensor]) -> None:
        routed = self._routed[layer]
        given = routed.hidden * tensors["e"].sum(0)
        routed.sum = given if routed.sum is None else routed.sum + given

    def unmix(self, layer: int, group: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor]:
        routed = self._routed[layer]
        assert routed.slope is not None
        back = routed.slope * tensors["e"].sum(0)
        routed.sum = back if routed.sum is None else routed.sum + back
        return ((routed.hidden * routed.slope).flatten(0, 1).sum(0).expand(tensors["e"].shape),)

    def forward(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        *,
        keep_graph: bool = False,
        keep_attention: bool = False,
    ) -> Tensor:
        if keep_attention:
            assert layer
            product = hidden * weights["w"]
            self._attention[layer] = (product, product.sum(-1).flatten())
        if keep_graph:
            self._kept[layer] = self._with_graph(weights, hidden)
            return self._kept[layer][2].detach()
        if layer in self._routed:
            given = self._routed.pop(layer).sum
            assert given is not None
            return hidden + hidden * weights["w"] + given
        return self._layer(hidden, weights)

    def take_attention(self, layer: int) -> tuple[Tensor, ...]:
        return self._attention.pop(layer)

    @staticmethod
    def _layer(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        y = x + x * weights["w"]
        return y + x * weights["e"].sum(0) if "e" in weights else y

    @classmethod
    def _with_graph(cls, weights: Mapping[str, Tensor], hidden: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        x, own = hidden.detach().requires_grad_(), {n: w.detach().requires_grad_() for n, w in weights.items()}
        with torch.enable_grad():
            return x, list(own.values()), cls._layer(x, own)

    def backward(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        hidden: Tensor | None,
        grad: Tensor,
        *,
        accumulate: Callable[[str, Tensor], None],
        attention: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if attention:
            assert hidden is not None
            assert torch.equal(attention[0], hidden * weights["w"])
            assert torch.equal(attention[1], attention[0].sum(-1).flatten())
        if layer in self._kept:
            x, own, y = self._kept.pop(layer)
        else:
            assert hidden is not None
            x, own, y = self._with_graph(weights, hidden)
        gx, *found = torch.autograd.grad(y, (x, *own), grad)
        if layer in self._routed:
            of_experts = self._routed.pop(layer).sum
            assert of_experts is not None
            gx = gx + of_experts
        return gx, tuple(found)

    def tail(
        self, hidden: Tensor, *, denominator: int, chunk: int, grad: bool, accumulate: Callable[[str, Tensor], None]
    ) -> ToyTail:
        model = self._model
        name = "stem:embed" if model.anatomy.stem_in_tail else "tail:head"
        x = hidden.detach().requires_grad_()
        norm = model.tail["norm"].detach().requires_grad_()
        head = (model.stem["embed"] if model.anatomy.stem_in_tail else model.tail["head"]).detach().requires_grad_()
        with torch.enable_grad():
            logits = (x * norm) @ head.T
            target = torch.nn.functional.pad(self._batch.labels[:, 1:], (0, 1), value=IGNORE)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
            loss = loss / denominator
        if not grad:
            return ToyTail(loss.detach(), None)
        gx, gn, gh = torch.autograd.grad(loss, (x, norm, head))
        accumulate("tail:norm", gn)
        accumulate(name, gh)
        return ToyTail(loss.detach(), gx)

    def sliced_tail(self, hidden: Tensor, *, denominator: int, chunk: int) -> SlicedTail:
        norm = self._model.tail["norm"].detach().requires_grad_()

        def logits(part: Tensor, piece: HeadSlice) -> Tensor:
            return (part * norm) @ piece.weight.T

        head = SliceableHead(logits, False, ("tail:norm",), (norm,))
        return SlicedTail(head, hidden=hidden, batch=self._batch, denominator=denominator, chunk=chunk)

    def finish(self, grad: Tensor, *, accumulate: Callable[[str, Tensor], None]) -> None:
        (g,) = torch.autograd.grad(self._graph, (self._model.stem["embed"],), grad)
        accumulate("stem:embed", g)


class ToyModel:
    def __init__(self, layers: int, *, tied: bool, experts: int = 0) -> None:
        self.anatomy = toy_anatomy(layers, tied=tied, experts=experts)
        self.attention_layers = frozenset(range(1, layers))  # the first layer has none
        head = ToyMatrix("embed" if tied else "head", V)
        self.slicing = ToySlicing(head, ToyMatrix("embed", V), tied)
        self.slices: ToySlices | None = None

    def outer_buffers_to(self, device: torch.device) -> None:
        pass

    def bind_outer(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor]) -> None:
        self.stem = {n: t.detach().requires_grad_() for n, t in stem.items()}
        self.tail = dict(tail)

    def divide_experts(self, count: int) -> tuple[ToyGroups | None, ...]:
        layouts = [unit.layout for unit in self.anatomy.layers]
        return tuple(ToyGroups.of(x, count=count) if count and len(x.params) > 1 else None for x in layouts)

    def tile_mlps(self, tokens: int) -> None:
        assert tokens == 0

    def bind_sliced(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor], rows: Tensor) -> ToySlices:
        self.bind_outer(stem={**stem, "embed": rows}, tail=tail)
        self.slices = ToySlices()
        return self.slices

    def documents(self, batch: MicroBatch) -> None:
        return None

    def begin(self, batch: MicroBatch, *, grad: bool, documents: None) -> ToyPass:
        return ToyPass(self, batch, grad=grad)

    def aux_loss(self, passes: Sequence[ToyPass], *, grad: bool) -> Tensor | None:
        return None


def toy_batches(count: int, *, seed: int = 0) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(0, V, (B, S), generator=generator)
        labels = ids.clone()
        labels[:, 0] = IGNORE
        out.append(MicroBatch(ids, labels, None, None, B * S, B * (S - 1)))
    return out
