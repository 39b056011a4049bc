"""What goes into the executor and what comes out of it: sizes, and a step's gradients and numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatrain.host.gradient import UnitGradient


@dataclass(frozen=True)
class Geometry:
    """Sizes that the executor allocates for; the memory plan decides them."""

    micro_batches: int  # most micro-batches of one step
    slots: int
    grad_buffers: int
    load_buffers: int  # 0: activations stay on the device
    head_chunk: int  # tokens of logits (of a slice, if there are slices) alive at once
    input_bytes: int  # of one micro-batch's stored input, at most
    resident: int = 0  # units, from the stem on, whose weights and optimizer state stay on the device
    kept: int = 0  # layers, from the last, whose forward keeps its graph for the backward
    head_slices: int = 0  # the head's weight comes in so many slices, the embedding as rows; 0: both come whole
    embedding_rows: int = 0  # with slices: the most distinct tokens of a step
    attention_bytes: int = 0  # of what attention gave in one layer and micro-batch, at most; 0: it is recomputed
    attention_buffers: int = 0  # of these on their way back; 0: kept ones stay on the device
    tile_tokens: int = 0  # of a tile of the layers' MLPs; 0: they run whole
    expert_groups: int = 0  # the experts of a layer come in at most so many groups; 0: with their layer


def slice_rows(rows: int, *, slices: int) -> int:
    """Rows of every slice but the last of a matrix of `rows`: a multiple of 8, which products like, unless tiny."""
    height = -(-rows // slices)
    return height if height < 64 else -(-height // 8) * 8


@dataclass(frozen=True)
class StepNumbers:
    """What a step computed, read back once."""

    loss: float  # mean cross-entropy over the step's supervised tokens
    aux_loss: float | None  # router loss before its coefficient
    grad_norm: float  # global 2-norm of the summed gradient, before clipping
    exposed_transfer_s: float  # compute stood still for a copy
    exposed_optimizer_s: float  # compute stood still for an update

    @property
    def finite(self) -> bool:
        total = self.loss + self.grad_norm + (self.aux_loss or 0.0)
        return total - total == 0.0


@dataclass(frozen=True)
class StepParts:
    """What the numbers of a step are made of, to find the part that is not finite."""

    losses: tuple[float, ...]  # each micro-batch's share of the loss
    unit_norms: dict[int, float]  # 2-norm of each unit's summed gradient


@dataclass(frozen=True)
class StepOutput:
    """A step that is enqueued: its gradients in the order of the update, and its numbers."""

    gradients: tuple[UnitGradient, ...]
    result: Callable[[], StepNumbers]  # waits for the device
    parts: Callable[[], StepParts]  # the same; reads back more
