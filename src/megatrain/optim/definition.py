"""AdamW by definition: the arithmetic of ``torch.optim.AdamW(fused=True)`` on the CPU, in plain torch.

Per element, every operation rounded to fp32, `fma` rounded once, the factors computed in double and then rounded::

    g = clip * grad
    p = keep * p                            keep = 1 - lr * weight_decay
    m = fma(1 - beta1, g - m, m)            beta1 <= 0.5: fma(-beta1, g - m, g)
    v = fma((1 - beta2) * g, g, beta2 * v)
    d = sqrt(v) / sqrt(1 - beta2^t) + eps
    p = p + (-lr / (1 - beta1^t) * m) / d

One quirk belongs to it: torch takes eight elements at a time, and its compiler contracted the loop over the last
``n % 8`` elements of a tensor the other way, ``v = fma(beta2, v, (1 - beta2) * g * g)``. The kernel does the same, so
that they agree for every length. The bits depend neither on threads nor on AVX-512 (torch's step stays at AVX2).

Moments kept in bf16 are widened first and rounded last (`rounding`); the weight moves by the m and v of fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatrain.optim.rounding import Draws, round_moments


@dataclass(frozen=True)
class AdamWHyper:
    """What stays the same over a run."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Factors:
    """The scalars of one update, still in double. Their order is that of the kernel's struct."""

    clip: float
    keep: float
    lerp: float
    beta2: float
    square: float
    bias2_sqrt: float
    eps: float
    neg_step: float

    @classmethod
    def of(cls, hyper: AdamWHyper, *, step: int, lr: float, clip: float, decays: bool) -> Factors:
        """Factors of update number `step` (1-based) of a parameter."""
        beta1, beta2 = hyper.betas
        return cls(
            clip=clip,
            keep=1 - lr * hyper.weight_decay if decays else 1.0,
            lerp=1 - beta1,
            beta2=beta2,
            square=1 - beta2,
            bias2_sqrt=math.sqrt(1 - beta2**step),
            eps=hyper.eps,
            neg_step=-(lr / (1 - beta1**step)),
        )


def adamw_reference(
    param: Tensor,  # fp32 [n], updated in place, as are the moments
    *,
    grad: Tensor,  # fp32 or bf16 [n], read only
    exp_avg: Tensor,  # fp32 or bf16 [n]
    exp_avg_sq: Tensor,  # of the same dtype [n]
    hyper: AdamWHyper,
    step: int,
    lr: float,
    clip: float,
    decays: bool,
    draws: Draws | None = None,  # for moments in bf16
) -> None:
    """AdamW update number `step` of a contiguous run of elements: the definition, and what runs without a kernel."""
    average, square = exp_avg.float(), exp_avg_sq.float()  # themselves where they are fp32
    adamw(
        [param], [grad.float() * clip], [average], [square], [], [torch.tensor(float(step - 1))],
        fused=True, amsgrad=False, maximize=False, lr=lr, beta1=hyper.betas[0], beta2=hyper.betas[1],
        weight_decay=hyper.weight_decay if decays else 0.0, eps=hyper.eps,
    )  # fmt: skip
    if draws is not None:
        round_moments(average, square, draws=draws, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
