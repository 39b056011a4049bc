"""The CUDA kernel's arithmetic, its source compiled for the CPU: the bits of the definition."""

from __future__ import annotations

import pytest
import torch
from cuda_on_host import launcher
from kernel_memory import DEFAULT, Memory, by_definition, factors_of, same

from megatrain.optim.definition import AdamWHyper
from megatrain.optim.kernel.on_device import DeviceKernel

LENGTHS = (*range(0, 70), 127, 128, 129, 1000, 20_003)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> DeviceKernel:
    return DeviceKernel(launcher(tmp_path_factory.mktemp("cuda")))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", [True, False], ids=["halves", "full"])
@pytest.mark.parametrize(
    ("hyper", "clip", "decays"),
    [
        (DEFAULT, 1.0, True),
        (DEFAULT, 0.37, False),
        (AdamWHyper(betas=(0.4, 0.9), eps=1e-8, weight_decay=0.1), 0.37, True),  # torch's other lerp
    ],
)
def test_equals_the_definition(
    kernel: DeviceKernel, *, split: bool, moments: torch.dtype, hyper: AdamWHyper, clip: float, decays: bool
) -> None:
    for n in LENGTHS:
        ours = Memory.random(n, split=split, moments=moments)
        theirs = ours.clone()
        for step in (1, 2, 1000):
            kernel.run([ours.job(factors_of(step, hyper=hyper, clip=clip, decays=decays))])
            by_definition(theirs, step=step, hyper=hyper, clip=clip, decays=decays)
        assert same(ours, theirs), n


def test_writes_only_its_run(kernel: DeviceKernel) -> None:
    for n in (1, 3, 4, 5, 1023, 1025):
        memory = Memory.random(n, split=True)
        before = memory.clone()
        kernel.run([memory.job(factors_of(1))])
        assert torch.equal(memory.grad, before.grad)
        for now, then in zip(memory.tensors(), before.tensors(), strict=True):
            assert torch.equal(now[memory.begin + n :], then[memory.begin + n :])
            assert torch.equal(now[: memory.begin], then[: memory.begin])
        assert not torch.equal(memory.exp_avg, before.exp_avg)
