"""The head in slices and the embedding as rows, by the product's executor, against plain Hugging Face.

fp32 on the CPU. Places are NaN-filled on release, so whatever reads a slice or a row that is not there shows.
"""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import numpy as np
import pytest
import test_parity
import torch
from test_parity import (
    BETAS,
    CLIP,
    DECAY,
    EPS,
    LR,
    VOCABULARY,
    assert_same,
    batches_of,
    reference_model,
    reference_step,
    streamed,
)
from torch import Tensor

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import MemoryPlan, Terms, account
from megatrain.plan.hardware import Limit
from megatrain.stream.device import CpuDevice
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry

CHUNKED = 5e-7
"""A chunked head (contract): relative to a tensor's largest element if that is over 1."""
MEAN_AFTER_STEPS = 1e-7
"""Mean difference of weights after three steps of AdamW at LR 1e-3; 1e-8 measured. Single elements may move by more:
the first steps are LR * g / |g|, so where a gradient is as small as its own rounding its share of LR is open."""
NAMES = ("llama", "llama tied", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi")


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to its largest element where that is over 1."""
    assert found.keys() >= expected.keys()
    return max(float((found[n] - t).abs().max()) / max(1.0, float(t.abs().max())) for n, t in expected.items())


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_are_those_of_plain_hugging_face(name: str) -> None:
    """Two slices; five, with chunks, packed rows, several micro-batches and inputs on the host."""
    for slices, chunk, micro_batches, loads in ((2, 48, 1, 0), (5, 11, 3, 2)):
        reference = reference_model(name)
        batches = batches_of(micro_batches, packed=slices == 5, seed=1)
        loss, expected = reference_step(reference, batches)
        options = {"micro_batches": micro_batches, "slots": 2, "loads": loads, "head_slices": slices, "chunk": chunk}
        with streamed(name, weights=reference, **options) as run:
            out = run.executor.train_step(batches, seed=0)
            numbers = out.result()
            for gradient in out.gradients:
                gradient.wait()
            assert abs(numbers.loss - float(loss)) <= CHUNKED * max(1.0, float(loss))
            assert worst(run.gradients(out), expected) <= CHUNKED
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
            assert numbers.grad_norm == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_three_clipped_steps_and_evaluations_are_those_of_the_unsliced_run(name: str) -> None:
    found = []
    for slices in (0, 4):
        with streamed(name, weights=reference_model(name), micro_batches=2, slots=2, head_slices=slices) as run:
            numbers = []
            for step in range(3):
                out = run.executor.train_step(batches_of(2, packed=False, seed=step), seed=step)
                one = out.result()
                numbers += [one.loss, one.grad_norm]
                run.submit(step + 1, out, clip=min(1.0, CLIP / (one.grad_norm + 1e-6)))
                numbers.append(run.executor.evaluate(batches_of(3, packed=True, seed=9))[0])
            run.worker.drain()
            steps = torch.cat([host.steps for host in run.store.units])
            found.append((numbers, {n: w.clone() for n, w in run.weights().items()}, steps))
    (whole, whole_weights, whole_steps), (sliced, sliced_weights, sliced_steps) = found
    assert sliced == pytest.approx(whole, rel=2e-6)
    assert torch.equal(sliced_steps, whole_steps)
    for weight, expected in whole_weights.items():
        moved = (sliced_weights[weight] - expected).abs()
        assert float(moved.mean()) <= MEAN_AFTER_STEPS, weight
        assert float(moved.max()) <= LR / 10, weight
    assert len(whole_weights) > 20


@pytest.mark.parametrize("name", ["llama", "llama tied", "phi"])
def test_three_clipped_steps_equal_torch_adamw_fed_the_same_gradients(name: str) -> None:
    """Tokens differ from step to step: rows that no token reads decay as they do when all rows are there."""
    reference = reference_model(name)
    with streamed(name, weights=reference, micro_batches=2, slots=2, head_slices=3, chunk=13) as run:
        decayed = [p for p in reference.parameters() if p.ndim >= 2]
        plain = [p for p in reference.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
        for step in range(3):
            batches = batches_of(2, packed=True, seed=step)
            out = run.executor.train_step(batches, seed=step)
            clip = min(1.0, CLIP / (out.result().grad_norm + 1e-6))
            for gradient in out.gradients:
                gradient.wait()
            found = run.gradients(out)
            _, expected = reference_step(reference, batches)  # at the same weights, bit for bit
            assert worst(found, expected) <= CHUNKED
            for parameter_name, parameter in reference.named_parameters():
                parameter.grad = found[parameter_name].clone() * torch.tensor(clip, dtype=torch.float32)
            run.submit(step + 1, out, clip=clip)
            optimizer.step()
        run.worker.drain()
        assert clip < 1
        assert assert_same(run.weights(), dict(reference.named_parameters()), tied=False) > 20


def test_rows_that_no_token_reads_have_no_gradient() -> None:
    weights = reference_model("llama")
    batches = batches_of(2, packed=True, seed=4)
    with streamed("llama", weights=weights, micro_batches=2, slots=2, head_slices=3) as run:
        out = run.executor.train_step(batches, seed=0)
        for gradient in out.gradients:
            gradient.wait()
        found = run.gradients(out)["model.embed_tokens.weight"].clone()
    used = torch.cat([b.input_ids.flatten() for b in batches]).unique()
    unused = torch.ones(VOCABULARY, dtype=torch.bool)
    unused[used] = False
    _, expected = reference_step(weights, batches)
    assert 0 < int(unused.sum()) < VOCABULARY
    assert not bool(found[unused].any())
    assert torch.equal(found.any(1), expected["model.embed_tokens.weight"].any(1))
    assert worst({"": found}, {"": expected["model.embed_tokens.weight"]}) <= CHUNKED


@pytest.mark.parametrize("slices", [0, 2])
def test_a_model_can_be_bound_again(slices: int) -> None:
    """As when a run is cut anew: with other slices, or whole."""
    batches = batches_of(2, packed=True, seed=4)
    with streamed("llama tied", weights=reference_model("llama tied"), micro_batches=2, slots=2, head_slices=5) as run:
        first = run.executor.train_step(batches, seed=0).result()
        run.store.arena.rewind()
        again = StreamingExecutor(
            run.model,
            store=run.store,
            device=CpuDevice(),
            geometry=Geometry(2, 2, 2, 0, 48, 1, head_slices=slices, embedding_rows=VOCABULARY if slices else 0),
            updates=run.worker,
            poison=True,
        )
        second = again.train_step(batches, seed=0).result()
    assert second.loss == pytest.approx(first.loss, rel=CHUNKED)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)


class RememberingDevice(CpuDevice):
    """Knows which of its buffers still have a view somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: list[weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = []

    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        memory = np.zeros(numel * dtype.itemsize, np.uint8)
        self.buffers.append(weakref.ref(memory))
        return torch.from_numpy(memory).view(dtype)


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize("name", ["llama", "llama tied", "phi"])
def test_a_closed_executor_leaves_nothing_on_the_device(name: str, slices: int) -> None:
    """The model outlives it: what it was bound to must not."""
    device = RememberingDevice()
    with (
        mock.patch.object(test_parity, "CpuDevice", return_value=device),
        streamed(name, weights=reference_model(name), micro_batches=2, slots=2, head_slices=slices) as run,
    ):
        run.executor.train_step(batches_of(2, packed=True, seed=4), seed=0).result()
        run.executor.close()
        gc.collect()
        assert len(device.buffers) > 5
        assert not any(ref() is not None for ref in device.buffers)


class CountingDevice(CpuDevice):
    """Remembers what it handed out."""

    taken = 0

    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        CountingDevice.taken += numel * dtype.itemsize
        return super().buffer(numel, dtype=dtype)


def planned_bytes(sizes: ModelSizes, *, stem_shared: bool, slices: int) -> int:
    """Of everything that the executor allocates before its first step."""
    limit = Limit(1 << 40, "test")
    chosen = MemoryPlan(
        2, 2, 24, 2, 2, "device", 0, 1024, 48, 1, {}, {}, limit, limit, on_cpu=True, head_slices=slices,
        embedding_rows=VOCABULARY if slices else 0,
    )  # fmt: skip
    terms = Terms(
        sizes=sizes, stem_shared=stem_shared, dense_masks=False, context_bytes=0, process_bytes=0, libraries_bytes=0,
        reserve=0, moment_bytes=4, batch_tokens=96,
    )  # fmt: skip
    table = account(chosen, terms=terms).device
    tables = 8 * VOCABULARY * (2 if stem_shared else 1) if slices else 0  # made anew in every step
    fixed = ("weight slots", "stem and tail", "fp32 gradient sums", "gradient buffers", "slices of the head")
    return sum(table.get(purpose, 0) for purpose in fixed) - tables


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize("name", ["llama", "llama tied", "phi"])
def test_the_plan_counts_what_is_allocated(name: str, slices: int) -> None:
    CountingDevice.taken = 0
    with (
        mock.patch.object(test_parity, "CpuDevice", CountingDevice),
        streamed(name, weights=reference_model(name), micro_batches=2, slots=2, head_slices=slices) as run,
    ):
        sizes, shared = run.model.sizes, run.model.anatomy.stem_shared
        assert CountingDevice.taken == planned_bytes(sizes, stem_shared=shared, slices=slices)
