"""The CUDA kernel on a device: the bits of the CPU kernel."""

from __future__ import annotations

import pytest
import torch
from kernel_memory import DEFAULT, Memory, factors_of, same

from megatrain.optim.definition import AdamWHyper
from megatrain.optim.kernel import load_kernel
from megatrain.optim.kernel.on_device import NAME, SOURCE, DeviceKernel
from megatrain.stream.device_cuda import open_cuda
from megatrain.stream.device_cuda_kernel import CudaKernel

pytestmark = pytest.mark.gpu


def moved(memory: Memory, device: torch.device | str) -> Memory:
    low = None if memory.low is None else memory.low.to(device)
    fields = {name: getattr(memory, name).to(device) for name in ("weights", "exp_avg", "exp_avg_sq", "grad")}
    return Memory(low=low, n=memory.n, begin=memory.begin, **fields)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", [True, False], ids=["halves", "full"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.9)])
def test_equals_the_cpu_kernel(*, split: bool, moments: torch.dtype, betas: tuple[float, float]) -> None:
    device = open_cuda(0)
    on_device = DeviceKernel(CudaKernel(SOURCE.read_text(), name=NAME, device=device))
    on_cpu = load_kernel(threads=4)
    assert on_cpu is not None
    hyper = AdamWHyper(betas=betas, eps=DEFAULT.eps, weight_decay=0.1)
    for n in (*range(1, 40), 128, 1000, 3_000_001):
        ours = Memory.random(n, split=split, moments=moments)
        there = moved(ours, device)
        for step in (1, 2, 1000):
            factors = factors_of(step, hyper=hyper)
            on_cpu.run([ours.job(factors)])
            on_device.run([there.job(factors)])
        assert same(ours, moved(there, "cpu")), n
    on_cpu.close()
