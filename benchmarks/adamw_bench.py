"""How fast the CPU AdamW is on this machine: against the memory's copy bandwidth, torch's fused step, DeepSpeedCPUAdam.

    python benchmarks/adamw_bench.py                  a table of G parameters/s and GB/s, best of --repeats
    python benchmarks/adamw_bench.py --json           the same, and medians, as one JSON object
    python benchmarks/adamw_bench.py --check          every instruction path against the scalar one, the definition
                                                      and torch.optim.AdamW(fused=True): status 1 if a bit differs

Everything runs on the same elements with the same number of threads. Bytes per parameter counted: hi/lo masters 26 (2+2
read and written, 8 of moments read and written, 2 of gradient read), 18 with bf16 moments; all fp32 28, 20 with bf16
moments; a copy counts what it reads and what it writes. DeepSpeed is measured where it is installed, in fp32, in a
process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from adamw_check import check
from adamw_state import HYPER, LR, State
from torch import Tensor

from megatrain.host.arena import Arena
from megatrain.optim.kernel import Isa, Kernel, load_library, supported_isas
from megatrain.optim.threads import optimizer_threads

BYTES = {("halves", "fp32"): 26, ("halves", "bf16"): 18, ("full", "fp32"): 28, ("full", "bf16"): 20}
COPY = "copy (memmove)"
TORCH, DEEPSPEED = "torch fused, fp32", "DeepSpeedCPUAdam, fp32"
BUFFER_BYTES = 16
"""Per element, of the arena: moments, weights and gradient in fp32."""


@dataclass(frozen=True)
class Rate:
    """Best and median of the repeats."""

    seconds: float
    median_s: float
    gparam_s: float | None  # None: a copy
    gb_s: float
    of_copy: float | None = None

    @classmethod
    def of(cls, times: list[float], *, n: int, bytes_each: float, copies: bool = False) -> Rate:
        best = min(times)
        gparam_s = None if copies else n / best / 1e9
        return cls(best, statistics.median(times), gparam_s, n * bytes_each / best / 1e9)


def timed(work: Callable[[], object], *, repeats: int) -> list[float]:
    """Seconds of each repeat, after one round of warm-up."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times


class Buffers:
    """Memory as the host store has it: huge pages, touched in parallel. Views of it in every format."""

    def __init__(self, n: int, *, threads: int) -> None:
        self.n = n
        self._arena = Arena(pinned_bytes=0, pageable_bytes=BUFFER_BYTES * n + (1 << 12), threads=threads, pin=False)
        self.wide, self.gradient, self.first, self.second = (
            self._arena.take(4 * n, pinned=False).view(torch.float32) for _ in range(4)
        )

    def state(self, form: str, moments: str) -> State:
        """Small gradients, moments of zero, and a step far from the first."""
        n = self.n
        weights, low, gradient = self.wide, None, self.gradient
        if form == "halves":
            weights, low = self.wide.view(torch.bfloat16)[:n], self.wide.view(torch.int16)[n:]
            gradient = self.gradient.view(torch.bfloat16)[:n]
        first, second = self.first, self.second
        if moments == "bf16":
            first, second = self.first.view(torch.bfloat16).chunk(2)
        weights.fill_(0.5)
        gradient.fill_(1e-3)
        first.zero_()
        second.zero_()
        return State(weights, low, first, second, gradient)


def copy_times(buffers: Buffers, *, threads: int, repeats: int) -> list[float]:
    """memmove of fp32 [n] by `threads` threads, each its own part."""
    source, into = buffers.wide, buffers.gradient
    part = 4 * buffers.n // threads
    with ThreadPoolExecutor(threads) as pool:

        def copy(i: int) -> None:
            ctypes.memmove(into.data_ptr() + i * part, source.data_ptr() + i * part, part)

        return timed(lambda: list(pool.map(copy, range(threads))), repeats=repeats)


def torch_times(buffers: Buffers, *, repeats: int) -> list[float]:
    state = buffers.state("full", "fp32")
    parameter = torch.nn.Parameter(state.weights)
    parameter.grad = state.grad
    optimizer = torch.optim.AdamW([parameter], lr=LR, weight_decay=HYPER.weight_decay, fused=True)
    moments: dict[str, Tensor] = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    optimizer.state[parameter] = {"step": torch.tensor(2.0), **moments}
    return timed(optimizer.step, repeats=repeats)


def deepspeed_times(n: int, *, threads: int, repeats: int) -> list[float] | None:
    """None where DeepSpeed is not installed. Raises RuntimeError with its words where it does not run."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    command = [sys.executable, str(Path(__file__).with_name("deepspeed_adam.py")), str(n), str(repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}  # OpenMP reads it once, when it starts
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"DeepSpeedCPUAdam did not run:\n{done.stderr.strip()[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def measure(buffers: Buffers, *, threads: int, repeats: int, isas: tuple[Isa, ...]) -> dict[str, Rate]:
    """One run of n parameters by every way."""
    n, library = buffers.n, load_library()
    torch.set_num_threads(threads)
    times = copy_times(buffers, threads=threads, repeats=repeats)
    rates = {COPY: Rate.of(times, n=n, bytes_each=8, copies=True)}
    for isa in isas:
        kernel = Kernel(library, threads=threads, isa=isa)
        for (form, moments), size in BYTES.items():
            job = buffers.state(form, moments).job(step=3)
            times = timed(lambda k=kernel, j=job: k.run([j]), repeats=repeats)
            rates[f"{isa.name.lower()} {form}, {moments} moments"] = Rate.of(times, n=n, bytes_each=size)
        kernel.close()
    rates[TORCH] = Rate.of(torch_times(buffers, repeats=repeats), n=n, bytes_each=BYTES["full", "fp32"])
    if (by_deepspeed := deepspeed_times(n, threads=threads, repeats=repeats)) is not None:
        rates[DEEPSPEED] = Rate.of(by_deepspeed, n=n, bytes_each=BYTES["full", "fp32"])
    copied = rates[COPY].gb_s
    return {name: Rate(**asdict(rate) | {"of_copy": rate.gb_s / copied}) for name, rate in rates.items()}


def table(rates: dict[str, Rate], *, n: int, threads: int) -> str:
    """Rows of a measurement; the last column is over DeepSpeed's rate in parameters (torch's where it is absent)."""
    against = DEEPSPEED if DEEPSPEED in rates else TORCH
    base = rates[against].gparam_s
    lines = [f"{n:,} elements, {threads} threads", f"{'':32}  Gparam/s    GB/s  of copy  x {against.split(',')[0]}"]
    for name, rate in rates.items():
        each = f"{rate.gparam_s:10.3f}" if rate.gparam_s else " " * 10
        ratio = f"{rate.gparam_s / base:10.2f}" if rate.gparam_s and base else ""
        lines.append(f"{name:32}{each}  {rate.gb_s:6.1f}  {rate.of_copy:6.0%} {ratio}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare bits instead of measuring; prints JSON")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
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
    buffers = Buffers(arguments.elements, threads=max(arguments.threads))
    everything: dict[str, object] = {"elements": arguments.elements}
    for threads in arguments.threads:
        rates = measure(buffers, threads=threads, repeats=arguments.repeats, isas=isas)
        everything[f"{threads} threads"] = {name: asdict(rate) for name, rate in rates.items()}
        if not arguments.json:
            print(table(rates, n=arguments.elements, threads=threads))
    if arguments.json:
        print(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
