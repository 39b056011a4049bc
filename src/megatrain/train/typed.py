"""Whether plain values from a file are of the types that a dataclass declares. A checksum says nothing about that."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin, get_type_hints


def misfit(instance: Any) -> str | None:
    """The first field of a dataclass whose value is not what it declares, for a message; None if all are.

    Understands classes, ``X | None``, ``dict[str, X]`` and ``Any``. Counts are never negative.
    """
    for name, declared in get_type_hints(type(instance)).items():
        value = getattr(instance, name)
        if not _fits(value, declared):
            return f"{name} is {str(value)[:40]!r}"
    return None


def _fits(value: Any, declared: Any) -> bool:
    if declared is Any:
        return True
    if get_origin(declared) is dict:
        _, inside = get_args(declared)
        return isinstance(value, dict) and all(isinstance(k, str) and _fits(v, inside) for k, v in value.items())
    if get_args(declared):  # a union
        return any(_fits(value, option) for option in get_args(declared))
    if dataclasses.is_dataclass(declared):
        return isinstance(value, declared) and misfit(value) is None  # type: ignore[arg-type]  # a class, not an instance
    if declared is int:
        return type(value) is int and 0 <= value < 2**63
    return type(value) in (int, float) if declared is float else isinstance(value, declared)
