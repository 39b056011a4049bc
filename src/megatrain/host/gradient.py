"""A gradient between two rooms: who computes it and who updates with it share the slab, not each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitGradient:
    """A unit's gradient on its way to the host slab."""

    unit: int  # index in the store
    wait: Callable[[], None]  # returns when the host slab is complete
    touched: tuple[bool, ...] | None  # per parameter: it got a gradient in this step; None: all did
