"""Plans in words: numbers with units, the cut of a step, a table of purposes on one line."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.plan.accounting import MemoryPlan
from megatrain.units import format_size

GIB = 1 << 30


def gib(size: int) -> str:
    """In GiB, so that the figures of a message compare; below a tenth of one in smaller units, not as 0.00 GiB."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB // 10 else format_size(size)


def cut(chosen: MemoryPlan) -> str:
    """ "8 rows of 2048 tokens at once and activations on the device"."""
    rows = "1 row" if chosen.micro_batch == 1 else f"{chosen.micro_batch} rows"
    return f"{rows} of {chosen.seq_len} tokens at once and activations {place(chosen)}"


def place(chosen: MemoryPlan) -> str:
    """Where activations wait; a CPU is no device beside its memory."""
    return "in memory" if chosen.on_cpu else f"on the {chosen.activations}"


def table(purposes: Mapping[str, int]) -> str:
    """Purposes of 0.01 GiB and more, the largest first."""
    by_size = sorted(purposes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in by_size if size >= GIB // 100)
