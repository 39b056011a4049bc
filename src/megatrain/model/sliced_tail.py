"""From the last layer's output to the loss and back, with the head's weight in slices that come one after another.

Two sweeps over the vocabulary. `measure` sees every slice once: each token's largest logit, the sum of exponentials
against it, and the logit of its label, all running and in fp32. Then the loss is known, and so is the softmax of any
slice by itself: `differentiate` sees every slice again, computes its logits anew, their slope, and the gradients of
the slice's weight and of the hidden states. (The running maximum and sum are those of online softmax: Milakov and
Gimelshein 2018, arXiv:1805.02867.)

Letters: B rows, S positions, D hidden, n supervised tokens, c of them in a chunk, v entries of the vocabulary in a
slice. Tokens without a label never enter the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.tail import Accumulate, shifted_labels


@dataclass(frozen=True)
class HeadSlice:
    """Rows [first, first + v) of the head. weight: [v, D], bias: [v], leaves where gradients are wanted."""

    first: int
    weight: Tensor
    bias: Tensor | None

    @property
    def last(self) -> int:
        return self.first + self.weight.shape[0]


@dataclass(frozen=True)
class SliceableHead:
    """The head as a function of a slice, and what else gets a gradient, named "stem:..." or "tail:..."."""

    logits: Callable[[Tensor, HeadSlice], Tensor]  # [..., 1, c, D] -> [1, c, v]
    compile: bool  # fuse what follows bf16 logits
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]


@dataclass(frozen=True)
class SliceGradient:
    """Of one chunk: of the slice's weight [v, D] and bias [v], in their dtype."""

    weight: Tensor
    bias: Tensor | None


class SlicedTail:
    """One micro-batch at the head. `measure` every slice, ask for the `loss`, `differentiate` every slice.

    Holds the hidden states from beginning to end, three fp32 numbers a token, and from the first `differentiate` on
    the fp32 sum of the hidden states' gradient, [..., n, D].
    """

    def __init__(
        self,
        head: SliceableHead,
        *,
        hidden: Tensor,  # [..., B, S, D]
        batch: MicroBatch,
        denominator: int,
        chunk: int,
    ) -> None:
        self._head, self._denominator, self._rows = head, denominator, batch.supervised
        self._share = torch.full((1, 1), 1.0 / denominator, dtype=torch.float32, device=hidden.device)
        self._hidden = hidden
        self._flat = hidden.flatten(-3, -2)  # [..., B*S, D]
        targets = shifted_labels(batch.labels).flatten()
        # Stable sort instead of nonzero: the number of supervised rows is known here, the device is not asked.
        self._order = torch.argsort((targets == IGNORE).to(torch.uint8), stable=True)[: self._rows]
        self._targets = targets[self._order].unsqueeze(-1)  # [n, 1]
        numbers = torch.zeros(3, self._rows, 1, dtype=torch.float32, device=hidden.device)
        self._most, self._total, self._picked = numbers  # [n, 1] each
        self._most.fill_(-torch.inf)
        self._grad: Tensor | None = None
        self._chunks = [slice(at, min(at + chunk, self._rows)) for at in range(0, self._rows, chunk)]

    def measure(self, piece: HeadSlice) -> None:
        """See a slice for the first time."""
        function = compiled_running() if self._fused else running
        for part in self._chunks:
            with torch.no_grad():
                logits = self._head.logits(self._part(part), piece).flatten(0, -2)
                numbers = (self._most[part], self._total[part], self._picked[part])
                found = function(logits, *numbers, self._targets[part] - piece.first)
                for number, value in zip(numbers, found, strict=True):
                    number.copy_(value)

    def loss(self) -> Tensor:
        """fp32 scalar: the sum of cross-entropies / denominator. Every slice has been measured."""
        each: Tensor = (self._most - self._picked) + self._total.log()
        return (each.sum(dtype=torch.float64) / self._denominator).to(torch.float32)

    def differentiate(
        self, piece: HeadSlice, *, accumulate: Accumulate, accumulate_slice: Callable[[SliceGradient], None]
    ) -> None:
        """See a slice for the second time. The gradients of its rows go to `accumulate_slice`, chunk by chunk."""
        if self._grad is None:
            shape = (*self._flat.shape[:-2], self._rows, self._flat.shape[-1])
            self._grad = torch.zeros(shape, dtype=torch.float32, device=self._flat.device)
        rows = [t for t in (piece.weight, piece.bias) if t is not None]
        for part in self._chunks:
            leaf = self._part(part).detach().requires_grad_(True)
            with torch.enable_grad():
                logits = self._head.logits(leaf, piece)
            slope = self._slope(logits.detach().flatten(0, -2), part=part, first=piece.first).view(logits.shape)
            inputs = [leaf, *rows, *self._head.parameters]
            back, *found = torch.autograd.grad([logits], inputs, [slope], allow_unused=True)
            del logits, slope
            self._grad[..., part, :].add_(back.squeeze(-3))
            accumulate_slice(SliceGradient(found[0], found[1] if piece.bias is not None else None))
            for name, gradient in zip(self._head.names, found[len(rows) :], strict=True):
                if gradient is not None:
                    accumulate(name, gradient)

    def hidden_grad(self) -> Tensor:
        """The gradient of the hidden states, shaped and typed as they are. Every slice has been seen twice."""
        whole = torch.zeros_like(self._hidden, memory_format=torch.contiguous_format)
        if self._grad is not None:
            flat = whole.flatten(-3, -2)
            flat.index_copy_(flat.dim() - 2, self._order, self._grad.to(whole.dtype))
        return whole

    @property
    def _fused(self) -> bool:
        return self._head.compile and self._hidden.dtype is torch.bfloat16

    def _part(self, part: slice) -> Tensor:
        return self._flat.index_select(-2, self._order[part]).unsqueeze(-3)  # [..., 1, c, D]

    def _slope(self, logits: Tensor, *, part: slice, first: int) -> Tensor:
        function = compiled_slope() if self._fused else slope_of_slice
        place = self._targets[part] - first
        slope: Tensor = function(logits, self._most[part], self._total[part], place, self._share)
        return slope


def running(
    logits: Tensor, most: Tensor, total: Tensor, picked: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The three numbers of every token, [c, 1] in fp32, after one more slice.

    logits: [c, v]. most, total: the largest logit so far, and the sum of exp(logit - most). picked: the label's logit,
    once seen. place: int64 [c, 1], the label's place in this slice; below 0 or from v on where it lies in another.
    """
    wide = logits.to(torch.float32, copy=True)
    new = torch.maximum(most, wide.amax(-1, keepdim=True))
    inside = (place >= 0) & (place < logits.shape[-1])
    seen = wide.gather(-1, place.clamp(0, logits.shape[-1] - 1))
    total = total * (most - new).exp() + wide.sub_(new).exp_().sum(-1, keepdim=True)
    return new, total, torch.where(inside, seen, picked)


def slope_of_slice(logits: Tensor, most: Tensor, total: Tensor, place: Tensor, share: Tensor) -> Tensor:
    """(softmax - onehot) * share, [c, v] in the logits' dtype.

    most, total: as `running` left them after the last slice. share: fp32 [1, 1].
    """
    wide = logits.to(torch.float32, copy=True).sub_(most).exp_().div_(total)
    inside = (place >= 0) & (place < logits.shape[-1])
    wide.scatter_add_(-1, place.clamp(0, logits.shape[-1] - 1), -inside.to(torch.float32))
    return wide.mul_(share).to(logits.dtype)


def fused_running(
    logits: Tensor, most: Tensor, total: Tensor, picked: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`running` for the compiler: nothing in place."""
    wide = logits.float()
    new = torch.maximum(most, wide.amax(-1, keepdim=True))
    inside = (place >= 0) & (place < logits.shape[-1])
    seen = logits.gather(-1, place.clamp(0, logits.shape[-1] - 1)).float()
    total = total * (most - new).exp() + (wide - new).exp().sum(-1, keepdim=True)
    return new, total, torch.where(inside, seen, picked)


def fused_slope(logits: Tensor, most: Tensor, total: Tensor, place: Tensor, share: Tensor) -> Tensor:
    """`slope_of_slice` for the compiler: one read of the logits, one write of their slope."""
    column = torch.arange(logits.shape[-1], device=logits.device)
    soft = (logits.float() - most).exp() / total
    return ((soft - (column == place).float()) * share).to(logits.dtype)


Running = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
SlopeOf = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def compiled_running() -> Running:
    """As one kernel or two. Made on first use: the compiler takes seconds to import."""
    compiled: Running = torch.compile(fused_running, dynamic=True)
    return compiled


@cache
def compiled_slope() -> SlopeOf:
    """As one kernel."""
    compiled: SlopeOf = torch.compile(fused_slope, dynamic=True)
    return compiled
