"""A piece of a unit's state that is updated somewhere else and comes back: what optimizer and device agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

VISIT_ELEMS = 4 << 20
"""Elements of a piece: copies of 8 to 16 MiB, which run at the link's full rate."""
VISIT_BYTES = 16 * VISIT_ELEMS
"""What a piece takes at most: a master, two fp32 moments and a gradient. In bf16 it is less."""


@dataclass(frozen=True)
class Visit:
    """Host tensors that travel together, each contiguous, and what is to be done to their copies."""

    written: tuple[Tensor, ...]  # come back
    read: tuple[Tensor, ...]  # do not
    update: Callable[[Sequence[Tensor]], None]  # called with the copies of `written` and `read`; enqueues its work
