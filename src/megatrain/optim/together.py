"""One update by two: the CPU kernel from the front of a unit, a device from its back, and both are done together.

Both compute the same bits (definition.py), so where the border lies changes no number, and it may follow the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor

from megatrain.host.visit import VISIT_ELEMS, Visit
from megatrain.optim.kernel import Job, Kernel
from megatrain.optim.kernel.on_device import DeviceKernel

BORDER = 1024
"""The border is a multiple of this: of torch's eight lanes (definition.py), and of every alignment."""
WORTHWHILE = 4 * BORDER
"""Elements below which a unit is not shared."""
FIRST_SHARE = 0.25
SMALLEST_SHARE = 0.02
LARGEST_SHARE = 0.9
STEP = 0.2
"""How far the share moves when one of the two has nothing to do at all."""


class Partner(Protocol):
    """Who takes pieces of host memory elsewhere, has them updated, and brings them back."""

    def start(self, visits: Sequence[Visit]) -> None: ...

    def finish(self) -> float: ...


class Together:
    """A `Kernel` that gives a share of every unit to a partner. The share follows the rates that were seen."""

    def __init__(self, kernel: Kernel, *, device_kernel: DeviceKernel, partner: Partner) -> None:
        self._kernel, self._device_kernel, self._partner = kernel, device_kernel, partner
        self.share = FIRST_SHARE
        self._alone = False

    @property
    def threads(self) -> int:
        return self._kernel.threads

    def run(self, jobs: Sequence[Job]) -> None:
        """Update everything in `jobs`, all of one unit; returns when it is done."""
        total = sum(job.weights.numel() for job in jobs)
        mine, theirs = divide(jobs, border=total - int(total * self.share))
        if self._alone or total < WORTHWHILE or not theirs:
            self._kernel.run(jobs)
            return
        self._partner.start([self._visit(piece) for job in theirs for piece in pieces(job, most=VISIT_ELEMS)])
        began_s = time.perf_counter()
        self._kernel.run(mine)
        mine_s = time.perf_counter() - began_s
        their_s = self._partner.finish()
        if mine and mine_s > 0 and their_s > 0:
            self._follow(mine_s, their_s=their_s)

    def go_alone(self) -> None:
        """Share nothing from now on: host memory that is not page-locked travels too slowly."""
        self._alone = True

    def close(self) -> None:
        self._kernel.close()

    def _follow(self, mine_s: float, *, their_s: float) -> None:
        """Towards the share with which both are done at once. By times, not by rates: pieces also wait for weights."""
        late = (mine_s - their_s) / (mine_s + their_s)
        self.share = min(max(self.share + STEP * late, SMALLEST_SHARE), LARGEST_SHARE)

    def _visit(self, job: Job) -> Visit:
        written = (job.weights, job.exp_avg, job.exp_avg_sq, *(() if job.low is None else (job.low,)))
        return Visit(written, (job.grad,), partial(_update, self._device_kernel, job))


def _update(kernel: DeviceKernel, job: Job, there: Sequence[Tensor]) -> None:
    weights, exp_avg, exp_avg_sq, *low, grad = there
    here = replace(job, weights=weights, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, low=low[0] if low else None, grad=grad)
    kernel.run([here])


def divide(jobs: Sequence[Job], *, border: int) -> tuple[list[Job], list[Job]]:
    """The jobs before and behind element number `border`, counted through all; the border moves down to a multiple."""
    before: list[Job] = []
    behind: list[Job] = []
    for job in jobs:
        n = job.weights.numel()
        at = n if border >= n else max(0, border) // BORDER * BORDER
        if at:
            before.append(part(job, 0, at))
        if at < n:
            behind.append(part(job, at, n))
        border = border - n if at == n else 0
    return before, behind


def pieces(job: Job, *, most: int) -> list[Job]:
    """The job in parts of at most `most` elements, a multiple of the border's."""
    n = job.weights.numel()
    return [part(job, first, min(first + most, n)) for first in range(0, n, most)]


def part(job: Job, first: int, last: int) -> Job:
    """Elements [first, last). `first` must be a multiple of eight, and `last` too unless it is the end."""
    elems = slice(first, last)
    return replace(
        job,
        weights=job.weights[elems],
        low=None if job.low is None else job.low[elems],
        exp_avg=job.exp_avg[elems],
        exp_avg_sq=job.exp_avg_sq[elems],
        grad=job.grad[elems],
        draws=None if job.draws is None else job.draws.skip(first),
    )
