"""How fast the CPU AdamW is on this machine, against torch's fused step and the memory's bandwidth. Prints JSON.

    python benchmarks/adamw_bench.py                  rates in G parameters/s and GB/s, best of --repeats
    python benchmarks/adamw_bench.py --check          every instruction path against the scalar one, and against
                                                      torch.optim.AdamW(fused=True): exit status 1 if a bit differs

Bytes per parameter counted: hi/lo masters 26 (2+2 read and written, 8 of moments read and written, 2 of gradient
read), fp32 28; a copy counts what it reads and what it writes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain.host.arena import Arena
from megatrain.optim.definition import AdamWHyper, Factors
from megatrain.optim.kernel import Isa, Job, Kernel, load_library, supported_isas
from megatrain.optim.threads import optimizer_threads

HYPER = AdamWHyper(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
LR = 1e-3
HALVES_BYTES, FULL_BYTES = 26, 28
CHECK_LENGTHS = (*range(130), 1000, 16383, 16384, 16385, 50_007)
CHECK_STEPS = 4


@dataclass
class State:
    """The tensors of a Job before it has factors."""

    weights: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor

    def job(self, *, step: int, clip: float = 0.7) -> Job:
        factors = Factors.of(HYPER, step=step, lr=LR, clip=clip, decays=True)
        return Job(self.weights, self.low, self.exp_avg, self.exp_avg_sq, self.grad, factors)

    def copy(self) -> State:
        low = None if self.low is None else self.low.clone()
        return State(self.weights.clone(), low, self.exp_avg.clone(), self.exp_avg_sq.clone(), self.grad.clone())

    def equals(self, other: State) -> bool:
        low = self.low is None or (other.low is not None and torch.equal(self.low, other.low))
        fields = ("weights", "exp_avg", "exp_avg_sq", "grad")
        return low and all(torch.equal(_bits(getattr(self, f)), _bits(getattr(other, f))) for f in fields)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype is torch.bfloat16 else torch.int32)


def random_state(n: int, *, halves: bool, offset: int = 0) -> State:
    """Values over many magnitudes, denormals among them; `offset` elements off any alignment."""
    wide = torch.bfloat16 if halves else torch.float32

    def spread(dtype: torch.dtype) -> Tensor:
        return (torch.randn(n + offset) * 10 ** torch.empty(n + offset).uniform_(-42, 2)).to(dtype)[offset:]

    low = torch.randint(-(2**15), 2**15, (n + offset,), dtype=torch.int16)[offset:] if halves else None
    return State(
        torch.randn(n + offset).to(wide)[offset:],
        low,
        spread(torch.float32),
        spread(torch.float32).abs_(),
        spread(wide),
    )


def check(threads: int) -> dict[str, object]:
    """Counts the cases in which a path's bits are not those of the scalar path, or of torch."""
    library = load_library()
    kernels = {isa: Kernel(library, threads=threads, isa=isa) for isa in supported_isas()}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases, different = 0, []
    for n in CHECK_LENGTHS:
        for halves in (True, False):
            start = random_state(n, halves=halves, offset=n % 5)
            ends = {}
            for isa, kernel in kernels.items():
                state = start.copy()
                for step in range(1, CHECK_STEPS + 1):
                    kernel.run([state.job(step=step)])
                ends[isa.name] = state
            if not halves:
                ends["torch fused"] = torch_steps(start.copy())
            for name, state in ends.items():
                cases += 1
                if not state.equals(ends[Isa.SCALAR.name]):
                    different.append(f"{name} n={n} {'halves' if halves else 'full'}")
    return {"paths": [isa.name for isa in kernels], "cases": cases, "different": different[:20], "equal": not different}


def torch_steps(state: State) -> State:
    """What torch's fused step makes of an fp32 state."""
    if not state.weights.numel():
        return state
    parameter = torch.nn.Parameter(state.weights.clone())
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=HYPER.weight_decay, fused=True)
    optimizer.state[parameter] = {
        "step": torch.tensor(0.0), "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq,
    }  # fmt: skip
    for _ in range(CHECK_STEPS):
        parameter.grad = state.grad * 0.7
        optimizer.step()
    return replace(state, weights=parameter.data)


def best_s(work: Callable[[], object], *, repeats: int) -> tuple[float, float]:
    """Best and median seconds; one round of warm-up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times)


def rate(seconds: tuple[float, float], *, n: int, bytes_each: float) -> dict[str, float]:
    best, median = seconds
    return {
        "gparam_s": round(n / best / 1e9, 3),
        "gparam_s_median": round(n / median / 1e9, 3),
        "gb_s": round(n * bytes_each / best / 1e9, 1),
    }


def copy_s(source: Tensor, *, into: Tensor, threads: int, repeats: int) -> tuple[float, float]:
    """memmove by `threads` threads, each its own part."""
    nbytes = source.numel() * source.itemsize
    part = nbytes // threads
    with ThreadPoolExecutor(threads) as pool:

        def copy(i: int) -> None:
            ctypes.memmove(into.data_ptr() + i * part, source.data_ptr() + i * part, part)

        return best_s(lambda: list(pool.map(copy, range(threads))), repeats=repeats)


def measure(n: int, *, threads: tuple[int, ...], repeats: int, isas: tuple[Isa, ...]) -> dict[str, object]:
    """Rates of one run of n parameters, in memory as the host store has it (huge pages, touched in parallel)."""
    most = max(threads)
    arena = Arena(pinned_bytes=0, pageable_bytes=18 * n + (1 << 20), threads=most, pin=False)

    def take(dtype: torch.dtype) -> Tensor:
        return arena.take(n * dtype.itemsize, pinned=False).view(dtype)

    moments = take(torch.float32), take(torch.float32)
    wide = take(torch.float32)
    full_grad = take(torch.float32)
    half, low = wide.view(torch.bfloat16)[:n], wide.view(torch.int16)[n:]
    half_grad = full_grad.view(torch.bfloat16)[:n]
    library = load_library()
    results: dict[str, object] = {"elements": n, "memory": str(arena.report)}
    for count in threads:
        torch.set_num_threads(count)
        here: dict[str, object] = {}
        copy_best, copy_median = copy_s(wide, into=full_grad, threads=count, repeats=repeats)
        here["copy_gb_s"] = round(8 * n / copy_best / 1e9, 1)
        here["copy_gb_s_median"] = round(8 * n / copy_median / 1e9, 1)
        here["add_in_place_gb_s"] = round(8 * n / best_s(lambda: wide.add_(0.0), repeats=repeats)[0] / 1e9, 1)
        full_grad.fill_(1e-3)
        half_grad.fill_(1e-3)
        for isa in isas:
            kernel = Kernel(library, threads=count, isa=isa)
            for name, weights, high_low, grad, size in (
                ("halves", half, low, half_grad, HALVES_BYTES),
                ("full", wide, None, full_grad, FULL_BYTES),
            ):
                job = State(weights, high_low, *moments, grad).job(step=3)
                seconds = best_s(lambda k=kernel, j=job: k.run([j]), repeats=repeats)
                here[f"{isa.name.lower()} {name}"] = rate(seconds, n=n, bytes_each=size)
            kernel.close()
        parameter = torch.nn.Parameter(wide)
        parameter.grad = full_grad
        optimizer = torch.optim.AdamW([parameter], lr=LR, fused=True)
        optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        here["torch fused"] = rate(best_s(optimizer.step, repeats=repeats), n=n, bytes_each=FULL_BYTES)
        results[f"{count} threads"] = here
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare bits instead of measuring")
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, nargs="+", default=[optimizer_threads()])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--isa", nargs="+", choices=[isa.name.lower() for isa in Isa], help="default: all of this CPU")
    arguments = parser.parse_args()
    if arguments.check:
        result = check(max(arguments.threads))
        print(json.dumps(result))
        return 0 if result["equal"] else 1
    wanted = arguments.isa or [isa.name.lower() for isa in supported_isas()]
    isas = tuple(isa for isa in supported_isas() if isa.name.lower() in wanted)
    result = measure(arguments.elements, threads=tuple(arguments.threads), repeats=arguments.repeats, isas=isas)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
