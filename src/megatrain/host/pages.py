"""What a block of the arena takes up: the arithmetic that planning and allocation share (no torch here)."""

from __future__ import annotations

import mmap

ALIGN = 256
BORDER = mmap.PAGESIZE
"""Lost at most once in an arena, where a page-locked block follows a pageable one."""


def footprint(nbytes: int, *, pinned: bool) -> int:
    """Bytes that `Arena.take` uses up for a block: page-locked blocks own whole pages."""
    unit = mmap.PAGESIZE if pinned else ALIGN
    return -(-nbytes // unit) * unit
