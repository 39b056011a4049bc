"""A gradient between two rooms: who computes it and who updates with it share the slab, not each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatrain.host.store import HostUnit


@dataclass(frozen=True)
class UnitGradient:
    """A unit's gradient on its way to the slab beside its weights."""

    unit: int  # index in the store
    wait: Callable[[], None]  # returns when the slab is complete
    touched: tuple[bool, ...] | None  # per parameter: it got a gradient in this step; None: all did
    resident: HostUnit | None = None  # the unit itself, with its slab, where it lives on the device
