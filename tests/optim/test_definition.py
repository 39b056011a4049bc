from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from megatrain.optim.definition import AdamWHyper, Factors, adamw_reference

HYPER = AdamWHyper(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
STEPS = 3


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gradients(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    magnitude = 10 ** torch.empty(n).uniform_(-8, 2, generator=generator)
    return [torch.randn(n, generator=generator) * magnitude for _ in range(STEPS)]


def by_reference(n: int, *, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    p, m, v = torch.linspace(-1, 1, n), torch.zeros(n), torch.zeros(n)
    for k, grad in enumerate(gradients(n), start=1):
        adamw_reference(
            p, grad=grad, exp_avg=m, exp_avg_sq=v, hyper=HYPER, step=k, lr=1e-3, clip=clip, decays=True
        )  # fmt: skip
    return p, m, v


def by_torch(n: int, *, clip: float) -> tuple[Tensor, Tensor, Tensor]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, n))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
    for grad in gradients(n):
        parameter.grad = grad.mul_(clip)
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.data, state["exp_avg"], state["exp_avg_sq"]


@cache
def on_one_thread() -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    torch.set_num_threads(1)
    return {n: by_torch(n, clip=0.37) for n in (*range(1, 130), 1000, 4097)}


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_equals_torch_whatever_the_threads_of_either(threads: int) -> None:
    expected_of = on_one_thread()
    torch.set_num_threads(threads)
    for n, expected in expected_of.items():
        for ours, theirs in zip(by_reference(n, clip=0.37), expected, strict=True):
            assert torch.equal(ours, theirs), n


def test_factors_without_decay_keep_the_weight_exactly() -> None:
    factors = Factors.of(HYPER, step=1, lr=1e-3, clip=1.0, decays=False)
    assert factors.keep == 1.0
    assert Factors.of(HYPER, step=1, lr=1e-3, clip=1.0, decays=True).keep == 1 - 1e-3 * 0.1


def test_gradient_is_not_written() -> None:
    grad = gradients(100)[0]
    before = grad.clone()
    adamw_reference(
        torch.ones(100), grad=grad, exp_avg=torch.zeros(100), exp_avg_sq=torch.zeros(100),
        hyper=HYPER, step=1, lr=1e-3, clip=0.5, decays=True,
    )  # fmt: skip
    assert torch.equal(grad, before)
