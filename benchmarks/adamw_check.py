"""Bits of every instruction path of this CPU, against the scalar one, the definition and torch's fused step."""

from __future__ import annotations

from dataclasses import replace

import torch
from adamw_state import HYPER, LR, State, random_state

from megatrain.host import halves
from megatrain.optim.definition import adamw_reference
from megatrain.optim.kernel import Isa, Kernel, load_library, supported_isas

LENGTHS = (*range(130), 1000, 16383, 16384, 16385, 50_007)
STEPS = 4
CLIP = 0.7


def check(threads: int) -> dict[str, object]:
    """Counts the cases in which a path's bits are not those of the scalar path."""
    library = load_library()
    kernels = {isa: Kernel(library, threads=threads, isa=isa) for isa in supported_isas()}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases, numbers, different = 0, 0, []
    for n in LENGTHS:
        for split in (True, False):
            for moments in (torch.float32, torch.bfloat16):
                start = random_state(n, halves=split, moments=moments, offset=n % 5)
                ends = _ends(start, kernels)
                for name, state in ends.items():
                    cases, numbers = cases + 1, numbers + state.numbers
                    if not state.equals(ends[Isa.SCALAR.name]):
                        different.append(f"{name} n={n} {'halves' if split else 'full'}, {moments} moments")
    torch.set_num_threads(before)
    return {
        "paths": [isa.name for isa in kernels],
        "cases": cases,
        "numbers": numbers,
        "different": different[:20],
        "equal": not different,
    }


def _ends(start: State, kernels: dict[Isa, Kernel]) -> dict[str, State]:
    """What each way makes of the same state."""
    ends = {}
    for isa, kernel in kernels.items():
        state = start.copy()
        for step in range(1, STEPS + 1):
            kernel.run([state.job(step=step, clip=CLIP)])
        ends[isa.name] = state
    ends["definition"] = _by_definition(start.copy())
    if start.low is None and start.exp_avg.dtype is torch.float32:
        ends["torch fused"] = _by_torch(start.copy())
    return ends


def _by_definition(state: State) -> State:
    for step in range(1, STEPS + 1):
        master = state.weights
        if state.low is not None:
            master = torch.empty(state.weights.numel())
            halves.join(state.weights, state.low, out=master)
        adamw_reference(
            master, grad=state.grad, exp_avg=state.exp_avg, exp_avg_sq=state.exp_avg_sq, hyper=HYPER, step=step,
            lr=LR, clip=CLIP, decays=True, draws=state.draws(step=step),
        )  # fmt: skip
        if state.low is not None:
            halves.split(master, hi=state.weights, lo=state.low)
    return state


def _by_torch(state: State) -> State:
    """What torch's fused step makes of an fp32 state."""
    if not state.weights.numel():
        return state
    parameter = torch.nn.Parameter(state.weights.clone())
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=HYPER.weight_decay, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(0.0), "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq,
    }  # fmt: skip
    for _ in range(STEPS):
        parameter.grad = state.grad * CLIP
        optimizer.step()
    return replace(state, weights=parameter.data)
