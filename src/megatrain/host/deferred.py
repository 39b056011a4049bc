"""Tensors that are not there yet: Hugging Face's own loading code runs on them and what it did is read off.

Checkpoints differ from modules in names, prefixes and structure (experts one by one, fused projections). The
rules are Hugging Face's and change with it, so they are not repeated here: ``from_pretrained`` gets a state
dict of `Deferred` tensors that know only shape and dtype and record the operations applied to them. A result
is then an expression over names; where it is made of moves alone (stack, cat, slices, transposes), every
element has one place of origin and can be read straight into place, or written straight out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError

Step = tuple[str, tuple[Any, ...]]
"""A view operation: method of Tensor and its arguments."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor with a name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Applied:
    """Output number `output` of an operation. Nodes stand among the arguments where tensors were."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None  # None: the operation returns one tensor
    shape: tuple[int, ...]


Node = Leaf | Applied


@dataclass(frozen=True)
class Move:
    """``whole[into] = leaf[out_of]``: a part of a result, and the named tensor (or part of it) that it is."""

    leaf: str
    out_of: tuple[Step, ...]
    into: tuple[Step, ...]


def walk(tensor: Tensor, *, steps: tuple[Step, ...]) -> Tensor:
    """The view that the steps lead to."""
    for method, args in steps:
        tensor = getattr(tensor, method)(*args)
    return tensor


class Deferred(Tensor):
    """A tensor known by shape, dtype and origin. Claims to be on the CPU; has no memory."""

    node: Node
    compare: Callable[[Node, Node], bool]

    @staticmethod
    def __new__(cls, node: Node, *, dtype: torch.dtype, compare: Callable[[Node, Node], bool]) -> Deferred:
        made = Tensor._make_wrapper_subclass(cls, node.shape, dtype=dtype, device=torch.device("cpu"))
        made.node = node
        made.compare = compare
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({self.node})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it on the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Deferred)]
        compare = tensors[0].compare
        if func is torch.ops.aten.equal.default:
            return args[0].shape == args[1].shape and compare(plain(args[0].node), plain(args[1].node))
        if func in _FRESH:  # a new tensor of the same shape: scratch of an initialisation that skips loaded weights
            return func(*pytree.tree_map_only(Deferred, _as_meta, args), **(kwargs | {"device": "meta"}))
        if func._schema.is_mutable:
            raise ModelError(f"loading this model changes weights in place ({func}), which is not supported")
        kwargs.pop("device", None)
        meta_args, meta_kwargs = pytree.tree_map_only(Deferred, _as_meta, (args, kwargs))
        result = func(*meta_args, **meta_kwargs)
        node_args, node_kwargs = pytree.tree_map_only(Deferred, lambda t: t.node, (args, kwargs))

        def wrap(value: Tensor, output: int | None) -> Deferred:
            node = Applied(func, node_args, node_kwargs, output, tuple(value.shape))
            return cls(node, dtype=value.dtype, compare=compare)

        if isinstance(result, Tensor):
            return wrap(result, None)
        if isinstance(result, list | tuple) and all(isinstance(r, Tensor) for r in result):
            return type(result)(wrap(r, i) for i, r in enumerate(result))
        raise ModelError(f"loading this model computes {func} from weights, which is not supported")


def _as_meta(tensor: Deferred) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


_aten = torch.ops.aten
_FRESH = frozenset(
    {_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
     _aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default, _aten.new_zeros.default}
)  # fmt: skip
_SAME = frozenset({_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default,
                   _aten.lift_fresh.default, _aten.view_as.default})  # fmt: skip
_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default,
                       _aten.squeeze.dim, _aten.squeeze.dims, _aten.squeeze.default})  # fmt: skip


def plain(node: Node) -> Node:
    """The node without operations that change nothing (copies, conversions of dtype)."""
    while isinstance(node, Applied) and (node.func in _SAME or (_reshapes(node) and node.args[0].shape == node.shape)):
        node = node.args[0]
    return node


def _reshapes(node: Applied) -> bool:
    return node.func in _RESHAPES


class NotAMove(Exception):
    """The expression computes something, so its parts have no single place of origin."""


def moves(node: Node, *, into: tuple[Step, ...] = ()) -> Iterator[Move]:
    """Take an expression apart into moves. Raises NotAMove."""
    node = plain(node)
    if isinstance(node, Leaf):
        yield Move(node.name, (), into)
        return
    func, args = node.func, node.args
    if func is _aten.cat.default or func is _aten.stack.default:
        dim = (args[1] if len(args) > 1 else node.kwargs.get("dim", 0)) % len(node.shape)
        start = 0
        for index, part in enumerate(args[0]):
            if func is _aten.stack.default:
                yield from moves(part, into=(*into, ("select", (dim, index))))
            else:
                yield from moves(part, into=(*into, ("narrow", (dim, start, part.shape[dim]))))
                start += part.shape[dim]
    elif func is _aten.transpose.int:
        yield from moves(args[0], into=(*into, ("transpose", (args[1], args[2]))))
    elif func is _aten.t.default:
        yield from moves(args[0], into=(*into, ("t", ())))
    elif func is _aten.permute.default:
        back = sorted(range(len(args[1])), key=lambda i: args[1][i] % len(args[1]))
        yield from moves(args[0], into=(*into, ("permute", tuple(back))))
    elif _reshapes(node):
        yield from moves(args[0], into=(*into, ("view", tuple(args[0].shape))))
    else:
        leaf, steps = _taken_from(node)
        yield Move(leaf, steps, into)


def _taken_from(node: Node) -> tuple[str, tuple[Step, ...]]:
    """A part of one leaf: its name and the views that lead to the part. Raises NotAMove."""
    node = plain(node)
    if isinstance(node, Leaf):
        return node.name, ()
    leaf, steps = _taken_from(node.args[0]) if isinstance(node.args[0], Leaf | Applied) else ("", ())
    step = _view_step(node)
    if not leaf or step is None:
        raise NotAMove(str(node.func))
    return leaf, (*steps, step)


def _view_step(node: Applied) -> Step | None:
    """The view that an operation on one tensor is, or None."""
    func, args = node.func, node.args
    if _reshapes(node):
        return "reshape", node.shape
    if func is _aten.slice.Tensor:
        dim, start, end, step = args[1:] + (0, None, None, 1)[len(args) - 1 :]
        first, last, stride = slice(start, end, step).indices(args[0].shape[dim])
        return ("narrow", (dim, first, last - first)) if stride == 1 else None
    if func is _aten.select.int:
        return "select", (args[1], args[2] % args[0].shape[args[1]])
    if func is _aten.unbind.int:
        return "select", ((args[1] if len(args) > 1 else 0), node.output)
    if func in (_aten.split.Tensor, _aten.split_with_sizes.default):
        dim = args[2] if len(args) > 2 else node.kwargs.get("dim", 0)
        sizes = args[1]
        number = node.output or 0
        start = number * sizes if isinstance(sizes, int) else sum(sizes[:number])
        return "narrow", (dim, start, node.shape[dim])
    if func is _aten.transpose.int:
        return "transpose", (args[1], args[2])
    if func is _aten.t.default:
        return "t", ()
    if func is _aten.permute.default:
        return "permute", tuple(args[1])
    return None


def evaluate(node: Node, *, leaves: Callable[[str], Tensor]) -> Tensor:
    """Compute an expression on real tensors."""
    if isinstance(node, Leaf):
        return leaves(node.name)
    args, kwargs = pytree.tree_map_only((Leaf, Applied), lambda n: evaluate(n, leaves=leaves), (node.args, node.kwargs))
    result: Any = node.func(*args, **kwargs)
    made: Tensor = result if node.output is None else result[node.output]
    return made


def deferred(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, compare: Callable[[Node, Node], bool]
) -> dict[str, Tensor]:
    """A state dict of named tensors that are not there. `compare` answers torch.equal of two of them."""
    return {n: Deferred(Leaf(n, shape), dtype=dtype, compare=compare) for n, (shape, dtype) in shapes.items()}
