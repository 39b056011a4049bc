"""A unit updated by two from both ends: the bits of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from kernel_memory import Memory, factors_of, same

from megatrain.host.visit import VISIT_BYTES, Visit
from megatrain.optim.kernel import Kernel
from megatrain.optim.kernel.on_device import DeviceKernel
from megatrain.optim.together import BORDER, LARGEST_SHARE, SMALLEST_SHARE, Together, divide, pieces

Make = Callable[..., Kernel]


class Elsewhere:
    """A partner that copies pieces, updates the copies and copies back, all when it is asked whether it is done."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.visits: list[Visit] = []
        self.elements = 0

    def start(self, visits: Sequence[Visit]) -> None:
        self.visits = list(visits)

    def finish(self) -> float:
        for visit in self.visits:
            assert sum(t.nbytes for t in (*visit.written, *visit.read)) <= VISIT_BYTES
            there = [t.clone() for t in (*visit.written, *visit.read)]
            visit.update(there)
            for target, source in zip(visit.written, there, strict=False):
                target.copy_(source)
            self.elements += visit.read[0].numel()
        return self.seconds


class StandIn(DeviceKernel):
    """The CPU's kernel in the place of the device's."""

    def __init__(self, kernel: Kernel) -> None:
        self.run = kernel.run  # type: ignore[method-assign]


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", [True, False], ids=["halves", "full"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
def test_a_shared_update_has_the_bits_of_one(
    kernel_of: Make, *, split: bool, moments: torch.dtype, share: float
) -> None:
    lengths = (1500, 1, 70_003, 4096, 9)
    together = [Memory.random(n, split=split, moments=moments) for n in lengths]
    alone = [memory.clone() for memory in together]
    kernel = kernel_of(threads=2)
    partner = Elsewhere(1.0)
    shared = Together(kernel, device_kernel=StandIn(kernel_of()), partner=partner)
    for step in (1, 2):
        shared.share = share
        shared.run([memory.job(factors_of(step)) for memory in together])
        kernel.run([memory.job(factors_of(step)) for memory in alone])
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    assert partner.elements == pytest.approx(2 * share * sum(lengths), abs=2 * BORDER)


def test_the_share_follows_the_times(kernel_of: Make) -> None:
    """A partner that takes almost no time ends with the largest share, one that takes for ever with next to nothing."""
    for seconds, expected in ((1e-9, LARGEST_SHARE), (1e9, SMALLEST_SHARE)):
        memory = Memory.random(300_000, split=True)
        shared = Together(kernel_of(), device_kernel=StandIn(kernel_of()), partner=Elsewhere(seconds))
        for step in range(1, 12):
            shared.run([memory.job(factors_of(step))])
        assert shared.share == expected


def test_borders_and_pieces_cover_everything_once() -> None:
    memory = Memory.random(10_000, split=True)
    job = memory.job(factors_of(1))
    for border in (0, 5, 1023, 1024, 5000, 9999, 10_000, 20_000):
        before, behind = divide([job, job], border=border)
        assert sum(j.weights.numel() for j in (*before, *behind)) == 20_000
        assert all(j.weights.numel() % BORDER == 0 for j in before if j.weights.numel() < 10_000)
        assert 0 <= border - sum(j.weights.numel() for j in before) < BORDER
    parts = pieces(job, most=4096)
    assert [p.weights.numel() for p in parts] == [4096, 4096, 1808]
    assert torch.equal(torch.cat([p.exp_avg for p in parts]), job.exp_avg)
