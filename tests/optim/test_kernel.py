"""The kernel's bits, on every instruction path that this CPU has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernel_memory import DEFAULT, ISAS, Memory, by_definition, factors_of, same

from megatrain.host import halves
from megatrain.optim import kernel as kernel_module
from megatrain.optim.definition import AdamWHyper
from megatrain.optim.kernel import Isa, Job, Kernel, KernelMissing, load_kernel, load_library
from megatrain.optim.kernel.build import BuildFailed, build
from megatrain.optim.rounding import Draws

Make = Callable[..., Kernel]

LENGTHS = (*range(130), 1000, 16383, 16384, 16385, 50_007)


def test_every_path_of_this_cpu_is_tested(library: ctypes.CDLL, kernel_of: Make) -> None:
    assert [isa for isa in Isa if library.megatrain_isas() >> isa & 1] == ISAS
    assert kernel_of().isa is ISAS[-1]
    for missing in set(Isa) - set(ISAS):
        with pytest.raises(ValueError, match=f"this CPU has no {missing.name}"):
            kernel_of(isa=missing)


MOMENTS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("moments", MOMENTS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", [True, False], ids=["halves", "full"])
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    ("hyper", "clip", "decays"),
    [
        (DEFAULT, 1.0, True),
        (DEFAULT, 0.37, False),
        (AdamWHyper(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.5), 0.01, True),
        (AdamWHyper(betas=(0.4, 0.9), eps=1e-8, weight_decay=0.1), 0.37, True),  # torch's other lerp
        (AdamWHyper(betas=(0.0, 0.99), eps=1e-8, weight_decay=0.0), 1.0, True),
    ],
)
def test_equals_the_definition(
    kernel_of: Make, *, isa: Isa, split: bool, moments: torch.dtype, hyper: AdamWHyper, clip: float, decays: bool
) -> None:
    kernel = kernel_of(threads=2, isa=isa)
    for n in LENGTHS:
        ours = Memory.random(n, split=split, offset=n % 7, moments=moments)
        theirs = ours.clone()
        for step in (1, 2, 1000):
            ours.run(kernel, factors=factors_of(step, hyper=hyper, clip=clip, decays=decays))
            by_definition(theirs, step=step, hyper=hyper, clip=clip, decays=decays)
        assert same(ours, theirs), n


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_equals_torch_over_many_steps(kernel_of: Make, *, isa: Isa) -> None:
    kernel, n = kernel_of(threads=3, isa=isa), 40_005
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(1)
        parameter = torch.nn.Parameter(torch.randn(n, generator=generator))
        ours, m, v = parameter.detach().clone(), torch.zeros(n), torch.zeros(n)
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
        for step in range(1, 201):
            gradient = torch.randn(n, generator=generator) * 10 ** torch.empty(n).uniform_(-6, 1, generator=generator)
            kernel.run([Job(ours, None, m, v, gradient, factors_of(step))])
            parameter.grad = gradient * 0.37
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    state = optimizer.state[parameter]
    for mine, torchs in ((ours, parameter.data), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert torch.equal(mine, torchs)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_halves_are_an_fp32_master_with_bf16_gradients(kernel_of: Make, *, isa: Isa) -> None:
    kernel, n = kernel_of(threads=2, isa=isa), 30_003
    split = Memory.random(n, split=True)
    assert split.low is not None
    full = Memory.random(n, split=False)
    halves.join(split.weights, split.low, out=full.weights)
    full.exp_avg, full.exp_avg_sq = split.exp_avg.clone(), split.exp_avg_sq.clone()
    for step in range(1, 51):
        split.grad.copy_(torch.randn(split.grad.shape, generator=torch.Generator().manual_seed(step)))
        full.grad.copy_(split.grad)
        split.run(kernel, factors=factors_of(step))
        full.run(kernel, factors=factors_of(step))
    joined = torch.empty_like(full.weights)
    halves.join(split.weights, split.low, out=joined)
    assert torch.equal(joined, full.weights)
    assert torch.equal(split.exp_avg, full.exp_avg)
    assert torch.equal(split.exp_avg_sq, full.exp_avg_sq)


@pytest.mark.parametrize("moments", MOMENTS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", [True, False], ids=["halves", "full"])
def test_threads_change_no_bit(kernel_of: Make, *, split: bool, moments: torch.dtype) -> None:
    expected = Memory.random(300_017, split=split, offset=3, moments=moments)
    start = expected.clone()
    expected.run(kernel_of(threads=1), factors=factors_of(5))
    for threads in range(2, 17):
        kernel = kernel_of(threads=threads)
        assert kernel.threads == threads
        ours = start.clone()
        ours.run(kernel, factors=factors_of(5))
        assert same(ours, expected), threads


def test_several_runs_of_any_length_in_one_call(kernel_of: Make) -> None:
    kernel = kernel_of(threads=4)
    lengths = (0, 1, 40_000, 0, 16384, 7, 128, 100_001, 0)
    together = [Memory.random(n, split=i % 2 == 0, moments=MOMENTS[i // 2 % 2]) for i, n in enumerate(lengths)]
    apart = [memory.clone() for memory in together]
    kernel.run([memory.job(factors_of(i + 1, decays=i % 3 == 0)) for i, memory in enumerate(together)])
    kernel.run([])
    for i, memory in enumerate(apart):
        memory.run(kernel, factors=factors_of(i + 1, decays=i % 3 == 0))
        assert same(memory, together[i]), lengths[i]


@pytest.mark.parametrize("moments", MOMENTS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_only_the_run_is_written_and_never_the_gradient(kernel_of: Make, *, isa: Isa, moments: torch.dtype) -> None:
    for n in (1, 15, 33, 129):
        memory = Memory.random(n, split=True, offset=1, moments=moments)
        before = memory.clone()
        memory.run(kernel_of(isa=isa), factors=factors_of(1))
        assert torch.equal(memory.grad, before.grad)
        for now, then in zip(memory.tensors(), before.tensors(), strict=True):
            assert torch.equal(now[: memory.begin], then[: memory.begin])
            assert torch.equal(now[memory.begin + n :], then[memory.begin + n :])


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_denormals_are_kept_even_where_they_are_switched_off(kernel_of: Make, *, isa: Isa) -> None:
    kernel = kernel_of(isa=isa)  # on this very thread
    memory = Memory.random(1003, split=False)
    memory.exp_avg.fill_(1e-40)
    memory.grad.zero_()
    expected = memory.clone()
    by_definition(expected, step=2, hyper=DEFAULT, clip=1.0, decays=True)
    flushing = torch.set_flush_denormal(True)
    try:
        memory.run(kernel, factors=factors_of(2, clip=1.0))
        still_flushing = float(torch.tensor(1e-40) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert flushing == still_flushing  # the caller's setting is given back
    assert bool((memory.exp_avg[memory.begin : memory.begin + memory.n] > 0).all())
    assert same(memory, expected)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_division_is_exact_at_zero_and_infinity(kernel_of: Make, *, isa: Isa) -> None:
    """A reciprocal would turn 0/0 guarded by eps, or x/inf, into something else."""
    n = 48
    memory = Memory.random(n, split=False)
    inside = slice(memory.begin, memory.begin + n)
    memory.exp_avg[inside] = 1.0
    memory.exp_avg_sq[inside] = torch.tensor([0.0, float("inf"), 1e-45, 3e38] * (n // 4))
    memory.grad.zero_()
    before = memory.weights[inside].clone()
    expected = memory.clone()
    by_definition(expected, step=1, hyper=DEFAULT, clip=1.0, decays=False)
    memory.run(kernel_of(isa=isa), factors=factors_of(1, clip=1.0, decays=False))
    assert same(memory, expected)
    assert torch.equal(memory.weights[inside][1::4], before[1::4])  # infinite second moment: no move


def test_a_tensor_that_would_be_misread_is_refused(kernel_of: Make) -> None:
    kernel = kernel_of()
    f32, i16, factors = torch.zeros(8), torch.zeros(8, dtype=torch.int16), factors_of(1)
    with pytest.raises(ValueError, match=r"expected torch\.bfloat16"):
        kernel.run([Job(f32, i16, f32.clone(), f32.clone(), f32.clone(), factors)])
    with pytest.raises(ValueError, match=r"expected torch\.float32 \[8\]"):
        kernel.run([Job(f32, None, torch.zeros(7), f32.clone(), f32.clone(), factors)])
    draws, narrow = Draws.of(seed=0, unit=0, step=1, first=0), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected torch\.bfloat16"):
        kernel.run([Job(f32, None, f32.clone(), f32.clone(), f32.clone(), factors, draws)])
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        kernel.run([Job(f32, None, narrow, narrow.clone(), f32.clone(), factors)])
    with pytest.raises(ValueError, match="contiguous"):
        kernel.run([Job(f32, None, torch.zeros(16)[::2], f32.clone(), f32.clone(), factors)])


def test_a_closed_kernel_says_so(library: ctypes.CDLL) -> None:
    kernel = Kernel(library, threads=2)
    kernel.close()
    kernel.close()
    with pytest.raises(RuntimeError, match="closed"):
        kernel.run([])


def test_without_a_library_the_fallback_is_announced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> ctypes.CDLL:
        return load_library(tmp_path / "none.so")

    monkeypatch.setattr(kernel_module, "load_library", missing)
    with pytest.warns(KernelMissing, match="plain torch, which is slower"):
        assert load_kernel(threads=2) is None


def test_without_a_compiler_the_build_says_what_it_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler found \(looked for c\+\+, g\+\+, clang\+\+"):
        build(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="no-such-compiler cannot be run"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []
