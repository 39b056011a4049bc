"""Disk that a run takes: the checkpoints that exist at once, and the exported model."""

from __future__ import annotations

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import checkpoint_bytes

KEPT = "checkpoints kept"


def disk_bytes(sizes: ModelSizes, *, moment_bytes: int, checkpoints: int, export_param_bytes: int) -> dict[str, int]:
    """By purpose. checkpoints: complete ones beside the one being written. export_param_bytes: 0 for no export."""
    one = checkpoint_bytes(sizes, moment_bytes=moment_bytes)
    table = {"checkpoint being written": one}
    if checkpoints:
        table[KEPT] = checkpoints * one
    if export_param_bytes:
        table["exported model"] = export_param_bytes * sizes.params_total
    return table


def kept_beside(*, keep: int, saves: int | None) -> int:
    """Complete checkpoints on disk while another is written. saves: how many the run writes, None if not known."""
    return keep if saves is None else max(0, min(keep, saves - 1))
