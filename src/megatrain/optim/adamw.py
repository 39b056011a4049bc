"""AdamW over the host store: which elements of a unit get which factors, then the kernel or plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.host import halves
from megatrain.host.store import HostStore, HostUnit
from megatrain.model.anatomy import Unit
from megatrain.model.layout import Entry
from megatrain.optim.definition import AdamWHyper, Factors, adamw_reference
from megatrain.optim.kernel import Job, Kernel
from megatrain.optim.kernel.on_device import DeviceKernel
from megatrain.optim.rounding import Draws

PLAIN_CHUNK = 1 << 22
"""Elements that the plain-torch path widens to fp32 at a time: bounds its temporary memory."""


@dataclass(frozen=True)
class Run:
    """Consecutive parameters of a unit that share every factor. No padding lies between them."""

    start: int  # element range
    stop: int
    byte_offset: int  # of its first element in the streamed block and the gradient slab
    halves: bool  # bf16 in the block with the low half apart; False: plain fp32
    decays: bool
    step: int  # the number of this update, bias corrections use it


class AdamW:
    """Updates units in place from their gradient slabs; counts the steps of every parameter."""

    def __init__(
        self,
        store: HostStore,
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decay_all: bool,
        never_decay: frozenset[str],
        kernel: Kernel | None,  # None: plain torch
        device_kernel: DeviceKernel | None = None,  # for units on a device
        seed: int = 0,  # of the run: moments in bf16 are rounded by it
    ) -> None:
        self.hyper = AdamWHyper(betas, eps, weight_decay)
        self.kernel, self._device_kernel = kernel, device_kernel
        self.seed = seed
        # without weight decay nothing tells the parameters of a layer apart, and they are one run
        self._decays = tuple(
            tuple(
                weight_decay != 0 and _decays(host.unit, entry, decay_all=decay_all, never_decay=never_decay)
                for entry in host.unit.layout.params
            )
            for host in store.units
        )

    def update(self, host: HostUnit, *, lr: float, clip: float, touched: tuple[bool, ...] | None = None) -> None:
        """One update of a unit with its slab's gradient times `clip`.

        Parameters that got no gradient (`touched` False, or never any: `Unit.unused`) are skipped as in torch:
        no decay, no step counted.
        """
        runs = self._runs(host, touched=touched)
        kernel = self.kernel if host.hi.is_cpu else self._device_kernel
        if kernel is None:
            for run in runs:
                self._plain(host, run, lr=lr, clip=clip)
        else:
            kernel.run([self._job(host, run, lr=lr, clip=clip) for run in runs])
        host.version += 1

    def _runs(self, host: HostUnit, *, touched: tuple[bool, ...] | None) -> list[Run]:
        """Counts the step of every parameter with a gradient, and groups them."""
        runs: list[Run] = []
        params = host.unit.layout.params
        decays = self._decays[host.unit.index]
        for i, entry in enumerate(params):
            if entry.name in host.unit.unused or (touched is not None and not touched[i]):
                continue
            host.steps[i] += 1
            run = _run_of(host.unit, entry, decays=decays[i], step=int(host.steps[i]))
            if runs and _adjoin(runs[-1], run):
                run = Run(runs[-1].start, run.stop, runs[-1].byte_offset, run.halves, run.decays, run.step)
                runs.pop()
            runs.append(run)
        return runs

    def _job(self, host: HostUnit, run: Run, *, lr: float, clip: float) -> Job:
        weights, grad = _typed(host, run, host.hi), _typed(host, run, host.grad)
        elems = slice(run.start, run.stop)
        return Job(
            weights=weights,
            low=host.lo[elems] if run.halves else None,
            exp_avg=host.exp_avg[elems],
            exp_avg_sq=host.exp_avg_sq[elems],
            grad=grad,
            factors=Factors.of(self.hyper, step=run.step, lr=lr, clip=clip, decays=run.decays),
            draws=self._draws(host, run),
        )

    def _draws(self, host: HostUnit, run: Run) -> Draws | None:
        """None: the unit's moments are fp32, and nothing is rounded."""
        if host.exp_avg.dtype is torch.float32:
            return None
        return Draws.of(seed=self.seed, unit=host.unit.index, step=run.step, first=run.start)

    def _plain(self, host: HostUnit, run: Run, *, lr: float, clip: float) -> None:
        weights, grad = _typed(host, run, host.hi), _typed(host, run, host.grad)
        draws = self._draws(host, run)
        chunk = PLAIN_CHUNK if run.halves or draws else run.stop - run.start
        for begin in range(0, run.stop - run.start, chunk):
            part = slice(begin, min(begin + chunk, run.stop - run.start))
            elems = slice(run.start + part.start, run.start + part.stop)
            master = weights[part]
            if run.halves:
                master = torch.empty(part.stop - part.start, dtype=torch.float32)
                halves.join(weights[part], host.lo[elems], out=master)
            adamw_reference(
                master,
                grad=grad[part],
                exp_avg=host.exp_avg[elems],
                exp_avg_sq=host.exp_avg_sq[elems],
                hyper=self.hyper,
                step=run.step,
                lr=lr,
                clip=clip,
                decays=run.decays,
                draws=draws.skip(begin) if draws else None,
            )
            if run.halves:
                halves.split(master, hi=weights[part], lo=host.lo[elems])


def _decays(unit: Unit, entry: Entry, *, decay_all: bool, never_decay: frozenset[str]) -> bool:
    """Matrices decay, vectors only with `decay_all`, biases and what Hugging Face marks never."""
    never = entry.name.endswith("bias") or not never_decay.isdisjoint(unit.full_names[entry.name])
    return not never and (decay_all or len(entry.shape) >= 2)


def _run_of(unit: Unit, entry: Entry, *, decays: bool, step: int) -> Run:
    halves = entry.elem_offset < unit.layout.bf16_elems
    return Run(entry.elem_offset, entry.elem_offset + entry.numel, entry.byte_offset, halves, decays, step)


def _adjoin(left: Run, right: Run) -> bool:
    same = (left.halves, left.decays, left.step) == (right.halves, right.decays, right.step)
    return same and left.stop == right.start


def _typed(host: HostUnit, run: Run, block: Tensor) -> Tensor:
    """The elements of `run` in a streamed block or slab: bf16 or fp32 [n]."""
    layout = host.unit.layout
    if run.halves:
        return layout.bf16_part(block)[run.start : run.stop]
    return layout.fp32_part(block)[run.start - layout.bf16_elems : run.stop - layout.bf16_elems]
