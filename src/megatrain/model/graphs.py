"""Questions to an autograd graph: which leaves, and which given tensors, does a result depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor


def reached(outputs: Iterable[Tensor], *, leaves: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of the `leaves` that a gradient of `outputs` would flow to. Nothing is computed."""
    by_id = {id(tensor): name for name, tensor in leaves.items()}
    found = {by_id[id(out)] for out in outputs if id(out) in by_id}
    for node in _nodes(outputs):
        variable = getattr(node, "variable", None)  # only AccumulateGrad nodes hold one
        if variable is not None and id(variable) in by_id:
            found.add(by_id[id(variable)])
    return frozenset(found)


def depends_on(output: Tensor, *, sources: Iterable[Tensor]) -> bool:
    """Whether the graph of `output` passes through the result of one of the non-leaf `sources`."""
    kept = [source.grad_fn for source in sources if source.grad_fn is not None]  # alive, so that ids stay theirs
    targets = {id(node) for node in kept}
    return any(id(node) in targets for node in _nodes([output]))


def _nodes(outputs: Iterable[Tensor]) -> list[object]:
    """Every node of the graphs behind `outputs` (kept alive by the list, so that ids stay unique)."""
    found: list[object] = []
    seen: set[int] = set()
    stack: list[object] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        stack.extend(n for n, _ in node.next_functions if n is not None)  # type: ignore[attr-defined]
    return found
