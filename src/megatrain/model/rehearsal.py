"""Layers run once with a graph but without weights: what the real run will do with its memory.

It tells which parameters never get a gradient, how many bytes per token autograd keeps, and whether the
attention bias has a gradient (then PyTorch picks another kernel under no_grad, and the first forward must run
with a graph to give the recompute's bits). Weights are one expanded element each, and the large products
(linear, grouped, attention) are replaced by functions that keep what the real ones keep and compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from megatrain.model.anatomy_of import LayerParts, hollow
from megatrain.model.experts import Experts, NotGroupable
from megatrain.model.graphs import reached
from megatrain.model.stubs import LayerCall, Recorder
from megatrain.model.unread import Labels

SHORT, LONG = 32, 96  # lengths at which layers are rehearsed; the difference is what grows with the tokens


@dataclass(frozen=True)
class Rehearsal:
    """What one layer showed. `saved_bytes`: kept for its backward at the length of the call, weights excluded."""

    layer: int  # its number
    unused: frozenset[str]
    unread: frozenset[str]  # weights whose product nobody reads when the layer is recomputed
    saved_bytes: int
    widest_bytes: int  # what the widest product takes in
    bias_has_gradient: bool
    experts_read: bool = False  # with stand-ins for experts: autograd keeps something that depends on what they give


class _Product(torch.autograd.Function):
    """Stands for a matrix product: keeps its inputs, returns zeros of the right shape."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_zeros((*rows.shape[:-1], width))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a rehearsal has no backward")


class _Attention(torch.autograd.Function):
    """Stands for fused attention: keeps its inputs, its output, and one number per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a rehearsal has no backward")


class _Apart(torch.autograd.Function):
    """Stands for experts that are run by themselves: keeps nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor) -> Tensor:
        return hidden.new_zeros(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("a rehearsal has no backward")


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Watch(TorchFunctionMode):
    """Puts the stand-ins in their places and notes an attention bias with a gradient."""

    def __init__(self, labels: Labels) -> None:
        super().__init__()
        self.bias_has_gradient = False
        self.widest_bytes = 0
        self._labels = labels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            bias = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            learned = bias is not None and bias.requires_grad
            self.bias_has_gradient |= learned
            return _apply(_Attention, *args[:3], bias if learned else None)
        rows = _multiplied(func, args)
        if rows is not None:
            self.widest_bytes = max(self.widest_bytes, rows.numel() * rows.element_size())
        if func is F.linear:
            bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
            out = _apply(_Product, args[0], args[1], args[1].shape[0])
            out = out if bias is None else out + bias
            self._labels.made(out, weight=args[1])
            return out
        if func is torch._grouped_mm:
            return _apply(_Product, args[0], args[1], args[1].shape[-1])
        return func(*args, **kwargs)


def _multiplied(func: Any, args: Any) -> Tensor | None:
    """What a product with a matrix of weights takes in, however the layer writes it; None for other functions."""
    if func in (F.linear, torch._grouped_mm):
        rows: Tensor = args[0]
        return rows
    if func is torch.addmm:  # transformers' Conv1D
        return args[1]  # type: ignore[no-any-return]
    if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and args[1].dim() == 2:
        return args[0]  # type: ignore[no-any-return]
    return None


class NoProducts(TorchFunctionMode):
    """Linear layers compute nothing: the head of a real vocabulary would take a CPU minutes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.linear:
            return func(*args, **kwargs)
        bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
        out = _apply(_Product, args[0], args[1], args[1].shape[0])
        return out if bias is None else out + bias


class Rehearsals:
    """Runs the layers of one recorded stem in order, so that state they hand on is there for the next."""

    def __init__(self, calls: Sequence[LayerCall], *, shared: Sequence[str]) -> None:
        self.calls = calls
        self._live: dict[str, MutableMapping[Any, Any]] = {n: type(calls[0].kwargs[n])() for n in shared}

    @classmethod
    def of_row(cls, recorder: Recorder, base: Callable[..., Any], *, length: int, shared: Sequence[str]) -> Rehearsals:
        """Of one row of `length` tokens. base: what runs the stem, on `input_ids`."""
        ids = torch.zeros(1, length, dtype=torch.int64)
        with torch.enable_grad():
            calls = recorder.record(lambda: base(input_ids=ids))
        return cls(calls, shared=shared)

    def run(self, index: int, *, layer: nn.Module, parts: LayerParts, experts: Experts | None = None) -> Rehearsal:
        """Run `layer`, number `index`; its own tensors are on the meta device before and after.

        experts: those of the layer, where it is to be rehearsed without them. Raises NotGroupable.
        """
        call = self.calls[index]
        weights = {n: hollow(t) for n, t in parts.tensors.items()}
        hidden = call.hidden.detach().requires_grad_(True)
        args, kwargs = pytree.tree_map_only(Tensor, _leaf, (list(call.args), dict(call.kwargs)))
        before = {n: dict(m) for n, m in self._live.items()}
        kwargs.update(self._live)
        if isinstance(call.where, int):
            args[call.where] = hidden
        else:
            kwargs[call.where] = hidden
        known = {t.untyped_storage()._cdata for t in (*weights.values(), hidden)}
        counted: dict[int, Any] = {}  # storages, held so that their addresses stay theirs

        labels = Labels()

        def note(tensor: Tensor) -> None:
            """Nothing is kept for a backward that never comes: an output kept by its own graph would never be freed."""
            labels.kept(tensor)
            storage = tensor.untyped_storage()
            if storage._cdata not in known and tensor.grad_fn is not None:
                counted.setdefault(storage._cdata, storage)

        watch, marker = _Watch(labels), torch.empty(0)
        apart = nullcontext() if experts is None else experts.call.answering(partial(_apart, labels, marker))
        parts.sites.put(weights)
        try:
            with apart, torch.enable_grad(), saved_tensors_hooks(note, _same), watch, labels:
                out = layer(*args, **kwargs)
        finally:
            parts.sites.clear()
        outputs = [out[0] if isinstance(out, tuple) else out, *self._written(before)]
        trainable = {n: t for n, t in weights.items() if t.requires_grad}
        saved = sum(int(s.nbytes()) for s in counted.values())
        return Rehearsal(
            layer=index,
            unused=frozenset(trainable) - reached(outputs, leaves=trainable),
            unread=labels.unread(trainable),
            saved_bytes=saved,
            widest_bytes=watch.widest_bytes,
            bias_has_gradient=watch.bias_has_gradient,
            experts_read=experts is not None and not labels.unread({"experts": marker}),
        )

    def _written(self, before: dict[str, dict[Any, Any]]) -> list[Tensor]:
        """Tensors that the layer put into the shared state."""
        return [
            leaf
            for name, mapping in self._live.items()
            for key, value in mapping.items()
            if before[name].get(key) is not value
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]


def bytes_per_token(short: int, long: int) -> int:
    """What a token adds, by what rows of SHORT and of LONG tokens took; rounded up."""
    return -(-(long - short) // (LONG - SHORT))


def form_of(call: LayerCall) -> object:
    """What a rehearsal depends on of a call: structure, shapes, types and plain values. It can be hashed."""
    leaves, structure = pytree.tree_flatten((call.where, call.args, dict(call.kwargs)))
    return str(structure), tuple(_form(leaf) for leaf in leaves)


def _form(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return type(leaf).__name__, repr(leaf)


def _apart(labels: Labels, marker: Tensor, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    if hidden.ndim != 2 or chosen.ndim != 2 or weights.shape != chosen.shape or len(chosen) != len(hidden):
        raise NotGroupable("the experts are not called with tokens, and each token's choices and their weights")
    out: Tensor = _apply(_Apart, hidden, weights)
    labels.made(out, weight=marker)
    return out


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(True) if tensor.requires_grad else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
