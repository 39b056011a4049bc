"""Runs of elements for the kernel, in memory with guards around, and what the definition makes of the same run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatrain.host import halves
from megatrain.optim.definition import AdamWHyper, Factors, adamw_reference
from megatrain.optim.kernel import Isa, Job, Kernel
from megatrain.optim.rounding import Draws

GUARD = 64
"""Elements around a run that must stay as they are."""
DEFAULT = AdamWHyper(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


@dataclass
class Memory:
    """A run's tensors inside larger ones: `offset` elements off alignment, with guards around."""

    weights: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    n: int
    begin: int

    @classmethod
    def random(
        cls, n: int, *, split: bool, offset: int = 0, seed: int = 0, moments: torch.dtype = torch.float32
    ) -> Memory:
        size, generator = n + 2 * GUARD + offset, torch.Generator().manual_seed(seed + n)

        def spread() -> Tensor:
            exponent = torch.empty(size).uniform_(-44, 3, generator=generator)  # denormals among them
            return torch.randn(size, generator=generator) * 10**exponent

        wide = torch.bfloat16 if split else torch.float32
        low = torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16, generator=generator) if split else None
        weights = torch.randn(size, generator=generator).to(wide)
        average, square = spread().to(moments), spread().abs_().to(moments)
        return cls(weights, low, average, square, spread().to(wide), n, GUARD + offset)

    @property
    def draws(self) -> Draws | None:
        """Some for moments in bf16, else None: always the same."""
        first = 3 * (self.n + 1) if self.n % 2 else (1 << 32) - self.n // 2  # the number may wrap around in a run
        return Draws.of(seed=1, unit=2, step=3, first=first) if self.exp_avg.dtype is torch.bfloat16 else None

    def job(self, factors: Factors) -> Job:
        part = slice(self.begin, self.begin + self.n)
        low = None if self.low is None else self.low[part]
        return Job(
            self.weights[part], low, self.exp_avg[part], self.exp_avg_sq[part], self.grad[part], factors, self.draws
        )

    def run(self, kernel: Kernel, *, factors: Factors) -> None:
        kernel.run([self.job(factors)])

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything, guards included, as bits: NaNs compare too."""
        found = [self.weights, self.exp_avg, self.exp_avg_sq, self.grad]
        found += [] if self.low is None else [self.low]
        return tuple(t.view(torch.int16 if t.itemsize == 2 else torch.int32) for t in found)

    def clone(self) -> Memory:
        low = None if self.low is None else self.low.clone()
        return replace(
            self, weights=self.weights.clone(), low=low, exp_avg=self.exp_avg.clone(),
            exp_avg_sq=self.exp_avg_sq.clone(), grad=self.grad.clone(),
        )  # fmt: skip


def same(left: Memory, right: Memory) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.tensors(), right.tensors(), strict=True))


def factors_of(step: int, *, hyper: AdamWHyper = DEFAULT, clip: float = 0.37, decays: bool = True) -> Factors:
    return Factors.of(hyper, step=step, lr=1e-3, clip=clip, decays=decays)


def by_definition(memory: Memory, *, step: int, hyper: AdamWHyper, clip: float, decays: bool) -> None:
    """The same update in plain torch."""
    part = slice(memory.begin, memory.begin + memory.n)
    master = memory.weights[part]
    if memory.low is not None:
        master = torch.empty(memory.n)
        halves.join(memory.weights[part], memory.low[part], out=master)
    adamw_reference(
        master, grad=memory.grad[part], exp_avg=memory.exp_avg[part], exp_avg_sq=memory.exp_avg_sq[part],
        hyper=hyper, step=step, lr=1e-3, clip=clip, decays=decays, draws=memory.draws,
    )  # fmt: skip
    if memory.low is not None:
        halves.split(master, hi=memory.weights[part], lo=memory.low[part])


def paths_of_this_cpu() -> list[Isa]:
    """From the operating system, not from the library that is tested."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    has = set(flags.split())
    found = [Isa.SCALAR]
    found += [Isa.AVX2] if {"avx2", "fma"} <= has else []
    found += [Isa.AVX512] if {"avx512f", "fma"} <= has else []
    return found


ISAS = paths_of_this_cpu()
