"""How inputs go wrong: whole documents with one part replaced by something that nobody expects, and broken bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

HUGE = [0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**400, -(10**30)]
FLOATS = [0.0, -0.0, 1.5, -1.5, 1e308, float("inf"), float("-inf"), float("nan")]
WORDS = [
    *("", " ", "None", "null", "\0", "\x1b[31m", "\u2028", "\ud800", "\ufeff", "é", "no", "1e999", "a" * 5000),
    *("../x", "/etc/passwd", "~nobody/x", "${HOME}", "${X", "{{ 1 }}", "{% for %}", "assistant", "user", "auto"),
]


def junk() -> st.SearchStrategy[Any]:
    """A value of any kind, mostly at the edge of its kind."""
    edges = st.sampled_from([None, True, False, *HUGE, *FLOATS, *WORDS, [], {}, [[]], [None], {"": None}, nested(2000)])
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    deep = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    )
    return edges | edges | plain | deep


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if len(at) > 20:  # junk of an earlier mutation
        return [at]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, child in children for path in _paths(child, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn, document: Any, *, most: int = 3) -> Any:
    """`document` with up to `most` of its parts replaced, removed, or joined by another."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        *above, last = draw(st.sampled_from([path for path in _paths(document) if path] or [("",)]))
        parent = document
        for key in above:
            parent = parent[key]
        if not isinstance(parent, (dict, list)):
            return draw(junk())
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "add" and isinstance(parent, dict):
            parent[draw(st.sampled_from([w for w in WORDS if w]) | st.text(max_size=8))] = draw(junk())
        elif action == "remove" and last in (parent if isinstance(parent, dict) else range(len(parent))):
            del parent[last]
        elif isinstance(parent, dict) or parent:
            parent[last] = draw(junk())
    return document


def as_json(value: Any) -> bytes:
    """JSON bytes of any junk: what json cannot encode as UTF-8 stays as an escape."""
    try:
        return json.dumps(value, ensure_ascii=True).encode()
    except (RecursionError, ValueError):  # nested too deeply; an integer of too many digits
        return b'{"a":' * 3000 + b"9" * 5000 + b"}" * 3000


@st.composite
def spliced(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a stretch of it replaced by other bytes, cut off, or doubled."""
    start = draw(st.integers(0, len(whole)))
    end = draw(st.integers(start, min(len(whole), start + 64)))
    middle = draw(st.binary(max_size=16) | st.sampled_from([b"", b"\xff" * 8, b"\0" * 8, b"\n", b"\xe2\x80\xa8", b'"']))
    match draw(st.sampled_from(["replace", "replace", "cut", "double"])):
        case "cut":
            return whole[:start]
        case "double":
            return whole[:end] + whole[start:]
    return whole[:start] + middle + whole[end:]


def broken(wholes: list[bytes]) -> st.SearchStrategy[bytes]:
    return st.sampled_from(wholes).flatmap(spliced) | st.binary(max_size=200)
