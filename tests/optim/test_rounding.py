"""Stochastic rounding of moments: its random bits, and that the mean stays where rounding to nearest stands still."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_memory import ISAS
from torch import Tensor

from megatrain.optim.definition import AdamWHyper, Factors, adamw_reference
from megatrain.optim.kernel import Isa, Job, Kernel
from megatrain.optim.rounding import Draws, round_moments

LARGEST = float(torch.finfo(torch.bfloat16).max)


def rounded(values: Tensor, *, step: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same values rounded as first and as second moments: bf16 [n] each."""
    first, second = (torch.empty(values.numel(), dtype=torch.bfloat16) for _ in range(2))
    draws = Draws.of(seed=seed, unit=0, step=step, first=0)
    round_moments(values, values.clone(), draws=draws, exp_avg=first, exp_avg_sq=second)
    return first, second


def halves_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """Random words as numbers of mean 0 and variance 1."""
    parts = (words & 0xFFFF, (words >> 16) & 0xFFFF)
    low, high = ((part.double() / 65536 - 0.5 + 2**-17) * math.sqrt(12) for part in parts)
    return low, high


def neighbours(value: float) -> tuple[float, float]:
    """The bf16 below and above a positive number."""
    bits = int(torch.tensor(value).view(torch.int32)) >> 16 << 16
    low, high = torch.tensor([bits, bits + 0x10000], dtype=torch.int32).view(torch.float32).tolist()
    return low, high


def test_the_words_are_what_the_definition_says() -> None:
    """In whole numbers, where the element's number passes 2^32 too."""
    mask = (1 << 32) - 1
    draws = Draws(0xDEADBEEF, 0x87654321, (1 << 32) - 40)
    for i, word in enumerate(draws.words(100).tolist()):
        h = ((draws.first + i) & mask) ^ draws.key0
        h = (h ^ h >> 16) * 0x7FEB352D & mask
        h = (h ^ h >> 15) + draws.key1 & mask
        h = h * 0x846CA68B & mask
        assert word & mask == h ^ h >> 16, i


def test_a_part_of_a_run_draws_the_same_words() -> None:
    whole = Draws.of(seed=4, unit=1, step=9, first=128)
    assert torch.equal(whole.words(5000)[777:], whole.skip(777).words(5000 - 777))


def test_seed_unit_and_step_each_change_the_words() -> None:
    base = {"seed": 4, "unit": 1, "step": 9}
    words = Draws.of(**base, first=0).words(1000)
    for key in base:
        other = Draws.of(**(base | {key: base[key] + 1}), first=0).words(1000)
        assert int((words == other).sum()) <= 1, key
    assert torch.equal(words, Draws.of(**base, first=0).words(1000))


def test_words_are_even_and_independent() -> None:
    """Of each other, of their two halves, of the step before, and for one element from step to step."""
    n, steps = 1 << 16, 64
    table = [halves_of(Draws.of(seed=0, unit=5, step=step, first=0).words(n)) for step in range(steps)]
    for half in (0, 1):
        values = torch.stack([pair[half] for pair in table])  # [steps, n]
        assert abs(float(values.mean())) * math.sqrt(values.numel()) < 5
        of_element = values.mean(0) * math.sqrt(steps)
        assert float(of_element.abs().max()) < 6
        assert 0.97 < float(of_element.std()) < 1.03
        for lag in (1, 2, 8, 16, 128, 4096):
            product = values[:, lag:] * values[:, :-lag]
            assert abs(float(product.mean())) * math.sqrt(product.numel()) < 5, lag
        following = values[1:] * values[:-1]
        assert abs(float(following.mean())) * math.sqrt(following.numel()) < 5
    both = torch.stack([low * high for low, high in table])
    assert abs(float(both.mean())) * math.sqrt(both.numel()) < 5


@pytest.mark.parametrize("value", [1.001, 1.0039, 3.3e-7, 0.7231, 1.234e-39, 2.9e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_is_the_value_itself(value: float, sign: int) -> None:
    """Within five standard errors, where rounding to nearest is hundreds of them away."""
    n = 1 << 20
    value = float(torch.tensor(value))
    low, high = neighbours(value)
    up = (value - low) / (high - low)
    standard_error = (high - low) * math.sqrt(up * (1 - up) / n)
    for result in rounded(torch.full((n,), sign * value)):
        assert set(result.float().unique().abs().tolist()) == {low, high}
        assert abs(float(result.double().mean()) - sign * value) < 5 * standard_error
    nearest = float(torch.tensor(value).bfloat16())
    assert abs(nearest - value) > 100 * standard_error


def test_the_mean_over_steps_is_the_value_itself() -> None:
    """For each element, too: what one update rounds up another rounds down."""
    values, steps = 1 + torch.arange(128) / 128 / 128, 2000  # over one spacing of bf16
    total = torch.zeros(128, dtype=torch.float64)
    for step in range(1, steps + 1):
        total += rounded(values, step=step)[1].double()
    up = (values.double() - 1) * 128
    error = (total / steps - values).abs() / (torch.sqrt(up * (1 - up) / steps) / 128).clamp(min=1e-12)
    assert float(error.max()) < 5


def test_what_is_a_bf16_never_moves() -> None:
    """All 2^16 patterns, whatever is drawn: zeros, denormals and infinities keep their bits, NaNs stay NaNs."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    exact = patterns.view(torch.bfloat16)
    for step in range(1, 20):
        for result in rounded(exact.float(), step=step):
            assert torch.equal(result.isnan(), exact.isnan())
            assert torch.equal(result.view(torch.int16)[~exact.isnan()], patterns[~exact.isnan()])


def test_no_finite_number_becomes_infinite_and_nothing_else_finite() -> None:
    inf, nan = float("inf"), float("nan")
    bits = torch.tensor([0x7F7FFFFF, 0x7F7F0001, 0x7F7EFFFF, 0x7FFFFFFF, -1, 0x7FC00001], dtype=torch.int32)
    values = torch.cat([torch.tensor([inf, -inf, nan, -3.4e38]), bits.view(torch.float32)])
    expected = [inf, -inf, nan, -LARGEST, LARGEST, LARGEST, None, nan, nan, nan]  # None: below the largest, rounds
    below = float(torch.tensor(0x7F7E0000, dtype=torch.int32).view(torch.float32))
    for step in range(1, 50):
        for result in rounded(values, step=step):
            for got, wanted in zip(result.tolist(), expected, strict=True):
                assert got in (below, LARGEST) if wanted is None else got == wanted or (got != got and wanted != wanted)


HYPER = AdamWHyper(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_increments_of_a_thousandth_accumulate(kernel_of: Callable[..., Kernel], *, isa: Isa) -> None:
    """A second moment of 1 under gradients whose square is 2 climbs by 0.1 % a step, and is 1.5 after 693."""
    n, steps = 4096, 693
    weights, average, square = torch.ones(n), torch.zeros(n).bfloat16(), torch.ones(n).bfloat16()
    gradient = torch.full((n,), math.sqrt(2))
    kernel = kernel_of(isa=isa)
    nearest = torch.ones(n).bfloat16()
    for step in range(1, steps + 1):
        draws = Draws.of(seed=0, unit=0, step=step, first=0)
        factors = Factors.of(HYPER, step=step, lr=0.0, clip=1.0, decays=False)
        kernel.run([Job(weights, None, average, square, gradient, factors, draws)])
        nearest = (nearest.float() * 0.999 + 0.002).bfloat16()
    values = square.double()
    exact = 2 - 0.999**steps
    assert abs(float(values.mean()) - exact) < 5 * float(values.std()) / math.sqrt(n)
    assert float(values.std()) < 0.15
    assert float(nearest.max()) == 1.0  # to nearest it would never have left
    assert abs(float(average.double().mean()) - math.sqrt(2)) < 1e-3


@pytest.mark.parametrize(("beta2", "noise"), [(0.999, 0.05), (0.95, 0.01)])
def test_the_noise_is_small_and_has_no_mean(kernel_of: Callable[..., Kernel], *, beta2: float, noise: float) -> None:
    """Over random gradients: what docs/precision.md says of moments, steps and where weights end."""
    n, steps, hyper = 4096, 1500, AdamWHyper(betas=(0.9, beta2), eps=1e-8, weight_decay=0.0)
    kernel, generator = kernel_of(), torch.Generator().manual_seed(0)
    wide, narrow = torch.zeros(3, n), [torch.zeros(n), *torch.zeros(2, n).bfloat16()]
    for step in range(1, steps + 1):
        gradient = torch.randn(n, generator=generator) * 1e-3
        factors = Factors.of(hyper, step=step, lr=1e-3, clip=1.0, decays=False)
        draws = Draws.of(seed=0, unit=0, step=step, first=0)
        kernel.run([Job(wide[0], None, wide[1], wide[2], gradient, factors)])
        kernel.run([Job(narrow[0], None, narrow[1], narrow[2], gradient, factors, draws)])
    off = narrow[2].double() / wide[2] - 1
    assert float(off.square().mean().sqrt()) < noise
    assert abs(float(off.mean())) < 5 * float(off.std()) / math.sqrt(n)
    steps_of = [average.double() / square.double().sqrt() for _, average, square in (wide, narrow)]
    assert float((steps_of[1] - steps_of[0]).norm() / steps_of[0].norm()) < 0.6 * noise + 0.005
    assert float((narrow[0] - wide[0]).norm() / wide[0].norm()) < 0.5 * noise + 0.005


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_numbers_that_are_not_finite_on_every_path(kernel_of: Callable[..., Kernel], *, isa: Isa) -> None:
    """beta 0 in both moments and a gradient of the value itself: m = g, v = g*g; bits are those of the definition."""
    inf, nan = float("inf"), float("nan")
    gradient = torch.tensor([1.0, inf, -inf, nan, 3.4e38, -3.4e38, 3.39e38, 1.8e19, 1.9e19, 1e-30, 0.0] * 12)
    n = gradient.numel()
    hyper = AdamWHyper(betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
    draws = Draws.of(seed=3, unit=0, step=1, first=17)
    ours, theirs = ([torch.zeros(n), *torch.zeros(2, n).bfloat16()] for _ in range(2))
    factors = Factors.of(hyper, step=1, lr=0.0, clip=1.0, decays=False)
    kernel_of(isa=isa).run([Job(*ours[:1], None, *ours[1:], gradient, factors, draws)])
    adamw_reference(
        theirs[0], grad=gradient, exp_avg=theirs[1], exp_avg_sq=theirs[2], hyper=hyper, step=1, lr=0.0, clip=1.0,
        decays=False, draws=draws,
    )  # fmt: skip
    for mine, defined in zip(ours[1:], theirs[1:], strict=True):
        assert torch.equal(mine.isnan(), defined.isnan())
        assert bool(mine.isnan().any())
        assert torch.equal(mine.nan_to_num(), defined.nan_to_num())
        assert torch.equal(mine.isinf(), defined.isinf())
    assert float(ours[1][4]) == LARGEST  # finite stays finite
