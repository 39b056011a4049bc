"""From the last layer's output to the loss and back: final norm and head by Hugging Face's own code.

Letters: B rows, S positions, D hidden, V vocabulary, n supervised tokens, c rows of a chunk.
With one chunk the arithmetic is Hugging Face's, bit for bit. With several only the supervised rows go
through the head, and one chunk of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.model.batch import IGNORE, MicroBatch


@dataclass(frozen=True)
class TailResult:
    """`loss`: fp32 scalar, sum of cross-entropies / denominator. `hidden_grad`: shaped as the hidden states."""

    loss: Tensor
    hidden_grad: Tensor | None


@dataclass(frozen=True)
class Head:
    """The head as a function, and its parameters with the names under which gradients are reported."""

    logits: Callable[[Tensor], Tensor]  # [..., b, s, D] -> [b, s, V]
    compile: bool  # fuse the loss of bf16 logits
    names: tuple[str, ...]  # "stem:..." or "tail:..."
    parameters: tuple[Tensor, ...]


Accumulate = Callable[[str, Tensor], None]


def tail_loss(
    head: Head,
    *,
    hidden: Tensor,  # [..., B, S, D]
    batch: MicroBatch,
    denominator: int,
    chunk: int,
    grad: bool,
    accumulate: Accumulate,
) -> TailResult:
    """Loss and gradients of a micro-batch; `chunk` is the most rows of logits that may exist at once."""
    if batch.input_ids.numel() <= chunk:
        return _whole(head, hidden=hidden, batch=batch, denominator=denominator, grad=grad, accumulate=accumulate)
    rows = batch.supervised
    flat = hidden.flatten(-3, -2)  # [..., B*S, D]
    targets = shifted_labels(batch.labels).flatten()
    # Stable sort instead of nonzero: the number of supervised rows is known here, the device is not asked.
    order = torch.argsort((targets == IGNORE).to(torch.uint8), stable=True)[:rows]
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    hidden_grad = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if grad else None
    flat_grad = hidden_grad.flatten(-3, -2) if hidden_grad is not None else None
    for start in range(0, rows, chunk):
        index = order[start : start + chunk]
        part = flat.index_select(-2, index).unsqueeze(-3)  # [..., 1, c, D]
        part_loss, part_grad = _chunk(
            head, part=part, targets=targets[index], denominator=denominator, grad=grad, accumulate=accumulate
        )
        loss += part_loss
        if flat_grad is not None and part_grad is not None:
            flat_grad.index_copy_(flat_grad.dim() - 2, index, part_grad.squeeze(-3))
    return TailResult(loss.to(torch.float32), hidden_grad)


def shifted_labels(labels: Tensor) -> Tensor:
    """labels [B, S] -> what position t must predict, [B, S]; the last position predicts nothing."""
    return F.pad(labels, (0, 1), value=IGNORE)[:, 1:]


def _whole(
    head: Head, *, hidden: Tensor, batch: MicroBatch, denominator: int, grad: bool, accumulate: Accumulate
) -> TailResult:
    with torch.set_grad_enabled(grad):
        leaf = hidden.detach().requires_grad_(grad)
        logits = head.logits(leaf).float()
        targets = shifted_labels(batch.labels).reshape(-1)
        total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, ignore_index=IGNORE, reduction="sum")
        loss = total / denominator
    del logits
    hidden_grad = None
    if grad:
        hidden_grad = _gradients([loss], [None], leaf=leaf, head=head, accumulate=accumulate)
    return TailResult(loss.detach(), hidden_grad)


def _chunk(
    head: Head, *, part: Tensor, targets: Tensor, denominator: int, grad: bool, accumulate: Accumulate
) -> tuple[Tensor, Tensor | None]:
    """Loss and input gradient of one chunk."""
    with torch.set_grad_enabled(grad):
        leaf = part.detach().requires_grad_(grad)
        logits = head.logits(leaf)
    loss, slope = _loss_and_slope(
        logits.detach(), targets=targets, denominator=denominator, grad=grad, compiled=head.compile
    )
    if slope is None:
        return loss, None
    return loss, _gradients([logits], [slope], leaf=leaf, head=head, accumulate=accumulate)


def _loss_and_slope(
    logits: Tensor,  # [1, c, V]
    *,
    targets: Tensor,  # [c]
    denominator: int,
    grad: bool,
    compiled: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sum of cross-entropies / denominator in fp64, and its gradient at the logits.

    In fp32 by PyTorch's own backward, so that the slopes are Hugging Face's bit for bit. In bf16, where the logits
    are the largest block on the device, softmax and slope are written over one fp32 block.
    """
    if logits.dtype is torch.float32:
        with torch.set_grad_enabled(grad):
            leaf = logits.requires_grad_(grad)
            rows = leaf.reshape(-1, logits.shape[-1])
            each = F.cross_entropy(rows, targets, ignore_index=IGNORE, reduction="none")
            total = each.sum() / denominator
        loss = each.detach().double().sum() / denominator
        return loss, torch.autograd.grad(total, leaf)[0] if grad else None
    rows = logits.reshape(-1, logits.shape[-1])
    share = (targets != IGNORE).to(torch.float32).unsqueeze(-1) * (1.0 / denominator)  # [c, 1]
    if compiled and grad:
        each, slope = compiled_loss_and_slope()(rows, targets.clamp_min(0).unsqueeze(-1), share)
        return each.double().sum(), slope.view(logits.shape)
    softmax = torch.log_softmax(rows, -1, dtype=torch.float32)
    loss = F.nll_loss(softmax, targets, ignore_index=IGNORE, reduction="none").double().sum() / denominator
    if not grad:
        return loss, None
    softmax.exp_().mul_(share)
    softmax.scatter_add_(-1, targets.clamp_min(0).unsqueeze(-1), -share)
    return loss, softmax.view(logits.shape).to(logits.dtype)


def fused_loss_and_slope(rows: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies times their share, fp32 [c, 1], and their slope at the logits, [c, V], in two reads of them.

    rows: bf16 logits [c, V]. targets: int64 [c, 1]. share: fp32 [c, 1], zero where there is no label.
    """
    wide = rows.float()
    most = wide.amax(-1, keepdim=True)
    total = (wide - most).exp().sum(-1, keepdim=True)
    norm = most + total.log()
    each = (norm - rows.gather(-1, targets).float()) * share
    place = torch.arange(rows.shape[-1], device=rows.device)
    slope = ((wide - norm).exp() - (place == targets).float()) * share
    return each, slope.to(rows.dtype)


@cache
def compiled_loss_and_slope() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same as one kernel. Made on first use: the compiler takes seconds to import."""
    compiled: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = torch.compile(
        fused_loss_and_slope, dynamic=True
    )
    return compiled


def _gradients(
    outputs: Sequence[Tensor], slopes: Sequence[Tensor | None], *, leaf: Tensor, head: Head, accumulate: Accumulate
) -> Tensor:
    first, *rest = torch.autograd.grad(outputs, [leaf, *head.parameters], slopes, allow_unused=True)
    for name, gradient in zip(head.names, rest, strict=True):
        if gradient is not None:
            accumulate(name, gradient)
    return first if first is not None else torch.zeros_like(leaf)
