"""Products that the backward recomputes for nothing, and how not to.

A layer's backward runs its forward again for the tensors that autograd keeps. The last product of a layer (the
down projection of an MLP, say) only feeds the residual sum: nobody keeps its result, so in the recompute its
values are never read and need not be computed. That is 0.6 of 8 N FLOP for a Llama-like layer.

`Labels` finds such products in a rehearsal: it follows every product's result through the layer, storage by
storage, and strikes it off when autograd keeps a tensor that depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Labels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which products each tensor's values depend on. A product is named by its weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, frozenset[int]] = {}  # storage -> ids of weights
        self._held: list[Any] = []  # storages, held so that their addresses stay theirs
        self._made: dict[int, int] = {}  # id of weight -> times it was multiplied
        self._read: set[int] = set()

    def made(self, out: Tensor, *, weight: Tensor) -> None:
        """`out` is (a sum with) the product of `weight`."""
        self._made[id(weight)] = self._made.get(id(weight), 0) + 1
        self._add(out, frozenset({id(weight)}))

    def kept(self, tensor: Tensor) -> None:
        """Autograd keeps `tensor` for the backward."""
        self._read |= self._of.get(tensor.untyped_storage()._cdata, frozenset())

    def unread(self, weights: dict[str, Tensor]) -> frozenset[str]:
        """Names of the weights whose product is computed once and never kept in any form."""
        return frozenset(name for name, w in weights.items() if self._made.get(id(w)) == 1 and id(w) not in self._read)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        labels: frozenset[int] = frozenset()
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                labels |= self._of.get(leaf.untyped_storage()._cdata, frozenset())
        if labels:
            for leaf in pytree.tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._add(leaf, labels)
        return out

    def _add(self, tensor: Tensor, labels: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        self._held.append(storage)
        self._of[storage._cdata] = self._of.get(storage._cdata, frozenset()) | labels


class _UnreadLinear(torch.autograd.Function):
    """A linear layer whose result nobody reads: only its backward, which is that of `F.linear` bit for bit."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.biased = bias is not None
        return rows.new_zeros((*rows.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        rows, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])  # [T, out]
        slope = flat.t().mm(rows.reshape(-1, rows.shape[-1])) if ctx.needs_input_grad[1] else None
        back = flat.mm(weight).view(rows.shape) if ctx.needs_input_grad[0] else None
        return back, slope, flat.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None


def skip_unread(layer: nn.Module, names: Iterable[str]) -> None:
    """From now on the linear modules that own these weights compute nothing where a graph is recorded.

    The caller promises that a layer runs with a graph only to be differentiated, but within `outputs_are_read`.
    Modules that are not plainly nn.Linear stay as they are.
    """
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = layer.get_submodule(path)
        if attribute == "weight" and type(module) is nn.Linear and type(module).forward is nn.Linear.forward:
            module.forward = _Skipping(module)  # type: ignore[method-assign, assignment]


_reading = [False]


@contextmanager
def outputs_are_read() -> Iterator[None]:
    """Within it a layer's output is wanted although a graph is recorded."""
    _reading[0] = True
    try:
        yield
    finally:
        _reading[0] = False


def outputs_are_read_now() -> bool:
    """Whether the caller is within `outputs_are_read`."""
    return _reading[0]


class _Skipping:
    """The forward of a linear module whose result is read only without a graph."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, rows: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        if torch.is_grad_enabled() and not _reading[0]:
            out: Tensor = _UnreadLinear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
            return out
        return F.linear(rows, weight, bias)
