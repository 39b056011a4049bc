"""The tensors that adamw_bench.py and adamw_check.py update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.optim.definition import AdamWHyper, Factors
from megatrain.optim.kernel import Job
from megatrain.optim.rounding import Draws

HYPER = AdamWHyper(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
LR = 1e-3


@dataclass
class State:
    """The tensors of a Job before it has factors."""

    weights: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    first: int = 0  # the number of the first element in its unit

    def draws(self, *, step: int) -> Draws | None:
        narrow = self.exp_avg.dtype is torch.bfloat16
        return Draws.of(seed=0, unit=1, step=step, first=self.first) if narrow else None

    def job(self, *, step: int, clip: float = 0.7) -> Job:
        factors = Factors.of(HYPER, step=step, lr=LR, clip=clip, decays=True)
        draws = self.draws(step=step)
        return Job(self.weights, self.low, self.exp_avg, self.exp_avg_sq, self.grad, factors, draws)

    def copy(self) -> State:
        low = None if self.low is None else self.low.clone()
        moments = self.exp_avg.clone(), self.exp_avg_sq.clone()
        return State(self.weights.clone(), low, *moments, self.grad.clone(), self.first)

    def equals(self, other: State) -> bool:
        """Bit for bit, NaNs among them."""
        low = self.low is None or (other.low is not None and torch.equal(self.low, other.low))
        fields = ("weights", "exp_avg", "exp_avg_sq", "grad")
        return low and all(torch.equal(_bits(getattr(self, f)), _bits(getattr(other, f))) for f in fields)

    @property
    def numbers(self) -> int:
        """How many are compared."""
        tensors = (self.weights, self.exp_avg, self.exp_avg_sq, self.grad)
        return sum(t.numel() for t in tensors) + (0 if self.low is None else self.low.numel())


def random_state(n: int, *, halves: bool, moments: torch.dtype, offset: int = 0) -> State:
    """Values over many magnitudes, denormals and, with bf16 moments, those that overflow among them.

    offset: elements off any alignment. The numbers of the elements pass 2^32 where n is even.
    """
    wide = torch.bfloat16 if halves else torch.float32
    largest = 38 if moments is torch.bfloat16 else 2

    def spread(dtype: torch.dtype, *, top: int = 2) -> Tensor:
        return (torch.randn(n + offset) * 10 ** torch.empty(n + offset).uniform_(-42, top)).to(dtype)[offset:]

    low = torch.randint(-(2**15), 2**15, (n + offset,), dtype=torch.int16)[offset:] if halves else None
    return State(
        torch.randn(n + offset).to(wide)[offset:],
        low,
        spread(moments, top=largest),
        spread(moments, top=largest).abs_(),
        spread(wide),
        first=7 * n if n % 2 else (1 << 32) - n // 2,
    )


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype is torch.bfloat16 else torch.int32)
