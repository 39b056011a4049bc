"""A recipe before it is checked: a tree that still knows where each value was written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Mark:
    """Where a value was written: a file and line, or an option of the command line (no line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    """One value: a scalar, a mapping of nodes, or a list of nodes."""

    value: Any  # scalar | dict[str, Node] | list[Node]
    mark: Mark


def plain(node: Node) -> Any:
    """The values alone."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def merge(lower: Node, *, upper: Node) -> Node:
    """`upper` over `lower`: mappings are merged key by key, anything else is replaced."""
    if not isinstance(lower.value, dict) or not isinstance(upper.value, dict):
        return upper
    merged = dict(lower.value)
    for key, child in upper.value.items():
        merged[key] = merge(merged[key], upper=child) if key in merged else child
    return replace(upper, value=merged)


def put(root: Node, *, path: Path, node: Node) -> Node:
    """`root` with `node` at `path`; missing mappings on the way are made, a number indexes an existing list.

    Raises IndexError for a number beyond the list.
    """
    if not path:
        return merge(root, upper=node)
    head, rest = path[0], path[1:]
    if isinstance(root.value, list) and isinstance(head, int):
        children = list(root.value)
        children[int(head)] = put(children[int(head)], path=rest, node=node)
        return replace(root, value=children)
    if not isinstance(root.value, dict):  # what stood here is gone: the mapping in its place is the new node's
        root = Node({}, node.mark)
    mapping = dict(root.value)
    mapping[str(head)] = put(mapping.get(str(head), Node({}, node.mark)), path=rest, node=node)
    return replace(root, value=mapping)


def mark_at(root: Node, *, path: Path) -> Mark:
    """Where the value at `path` was written; for a value that nobody wrote, its nearest parent that somebody did."""
    node = root
    for key in path:
        child = _child(node, key=key)
        if child is None:
            break
        node = child
    return node.mark


def find(root: Node, *, path: Path) -> Node | None:
    """The node at `path`, if somebody wrote it."""
    node: Node | None = root
    for key in path:
        node = None if node is None else _child(node, key=key)
    return node


def _child(node: Node, *, key: str | int) -> Node | None:
    if isinstance(node.value, dict):
        return node.value.get(key)
    if isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
        found: Node = node.value[key]
        return found
    return None


def without(root: Node, *, path: Path) -> Node:
    """`root` less the value at `path` (or the nearest parent of it that exists)."""
    if not path:
        return root
    head, rest = path[0], path[1:]
    if isinstance(root.value, dict) and head in root.value:
        mapping = dict(root.value)
        child = mapping[str(head)]
        if rest and isinstance(child.value, dict):
            mapping[str(head)] = without(child, path=rest)
        else:
            del mapping[str(head)]
        return replace(root, value=mapping)
    return root


def dotted(path: Path) -> str:
    """``data.train.0.limit``: the form that ``--set`` takes."""
    return ".".join(str(part) for part in path)


def parse_key(key: str) -> Path:
    """The path that `dotted` wrote."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))
