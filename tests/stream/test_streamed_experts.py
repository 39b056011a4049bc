"""Experts in groups by the product's executor, against plain Hugging Face and against the same step with whole layers.

fp32 on the CPU. Places are NaN-filled on release, so whatever reads a group that is not there shows.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from unittest import mock

import pytest
import test_parity
import torch
from test_parity import (
    ROWS,
    VOCABULARY,
    assert_same,
    batches_of,
    reference_model,
    reference_step,
    streamed,
)
from test_sliced import CountingDevice, RememberingDevice
from torch import Tensor

from megatrain.model.experts import CLEAN_BIASES, _release
from megatrain.plan.accounting import MemoryPlan, Terms, account
from megatrain.plan.hardware import Limit
from megatrain.stream.device import CpuDevice
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry

BIASED = ("gpt_oss",) if _release() >= CLEAN_BIASES else ()  # refused by name before
NAMES = ("mixtral", "qwen3_moe routed", *BIASED)
GROUPED = 2e-6
"""Largest difference of a gradient, relative to its own largest element; 1e-6 measured. Groups are summed one after
the other, whole layers in the order of a token's choices; and within an expert its tokens in the order of an unstable
sort, which depends on how many experts there are."""
AFTER_STEPS = 1e-8
"""Mean difference of weights after three steps at LR 1e-3: 1e-9 measured. Where a gradient is as small as its own
rounding AdamW's first steps are open by LR."""


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() >= expected.keys()
    return max(float((found[n] - t).abs().max() / t.abs().max().clamp_min(1e-30)) for n, t in expected.items())


@pytest.mark.parametrize("name", ["mixtral", *BIASED])
def test_loss_and_every_gradient_are_those_of_plain_hugging_face(name: str) -> None:
    shapes = [(2, 1, 0, 0, False), (3, 3, 2, 0, True), (5, 2, 1, 3, True)]
    for groups, micro_batches, loads, slices, packed in shapes:
        reference = reference_model(name)
        batches = batches_of(micro_batches, packed=packed, seed=1)
        loss, expected = reference_step(reference, batches)
        options = {"micro_batches": micro_batches, "slots": 2, "loads": loads, "head_slices": slices}
        with streamed(name, weights=reference, expert_groups=groups, **options) as run:
            out = run.executor.train_step(batches, seed=0)
            numbers = out.result()
            for gradient in out.gradients:
                gradient.wait()
            assert numbers.loss == pytest.approx(float(loss), rel=5e-7)
            assert worst(run.gradients(out), expected) <= GROUPED, (groups, slices)
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
            assert numbers.grad_norm == pytest.approx(float(norm), rel=1e-6)
            parts = out.parts()
            whole = torch.tensor(list(parts.unit_norms.values())).norm()
            assert float(whole) == pytest.approx(numbers.grad_norm, rel=1e-6)


def test_with_two_choices_a_token_only_the_experts_own_gradients_are_rounded_otherwise() -> None:
    """a + b is b + a: what two groups give adds up to the bits of the whole layer."""
    reference = reference_model("mixtral")
    batches = batches_of(3, packed=True, seed=1)
    found = {}
    for groups in (0, 2):
        with streamed("mixtral", weights=reference, micro_batches=3, slots=2, expert_groups=groups) as run:
            out = run.executor.train_step(batches, seed=0)
            loss = out.result().loss
            for gradient in out.gradients:
                gradient.wait()
            found[groups] = loss, {n: t.clone() for n, t in run.gradients(out).items()}
    assert found[2][0] == found[0][0]
    others = {n: t for n, t in found[0][1].items() if ".experts." not in n}
    assert assert_same(found[2][1], others, tied=False) > 20
    assert worst(found[2][1], found[0][1]) <= GROUPED


@dataclass(frozen=True)
class After:
    """What three steps and an evaluation left."""

    numbers: list[float]
    weights: dict[str, Tensor]


def three_steps(name: str, *, groups: int) -> After:
    with streamed(name, weights=reference_model(name), micro_batches=2, slots=2, loads=2, expert_groups=groups) as run:
        numbers = []
        for step in range(3):
            out = run.executor.train_step(batches_of(2, packed=True, seed=step), seed=step)
            one = out.result()
            numbers += [one.loss, one.grad_norm, one.aux_loss or 0.0]
            run.submit(step + 1, out, clip=min(1.0, 0.5 / one.grad_norm))
        numbers.append(run.executor.evaluate(batches_of(3, packed=True, seed=9))[0])
        run.worker.drain()
        return After(numbers, {n: w.clone() for n, w in run.weights().items()})


@pytest.mark.parametrize("name", NAMES[1:])
def test_three_clipped_steps_and_an_evaluation_are_those_of_whole_layers(name: str) -> None:
    """Router loss included, and a layer without experts among them."""
    whole, grouped = (three_steps(name, groups=groups) for groups in (0, 3))
    assert grouped.numbers == pytest.approx(whole.numbers, rel=2e-6)
    assert (name == "qwen3_moe routed") == (whole.numbers[2] > 0)
    differences = torch.cat([(grouped.weights[n] - w).abs().flatten() for n, w in whole.weights.items()])
    assert float(differences.mean()) <= AFTER_STEPS
    moved = reference_model(name).state_dict()
    changed = torch.cat([(moved[n] - w).abs().flatten() for n, w in whole.weights.items() if n in moved])
    assert float(changed.mean()) > 100 * float(differences.mean())


def test_memory_options_never_change_numbers() -> None:
    """The number of groups is one of rounding, as a micro-batch is; slots, buffers and where inputs wait are not."""
    found = []
    for slots, loads, buffers in ((2, 0, 2), (2, 1, 1), (3, 2, 2), (3, 0, 1)):
        options = {"slots": slots, "loads": loads, "buffers": buffers, "expert_groups": 3}
        with streamed(NAMES[-1], weights=reference_model(NAMES[-1]), micro_batches=2, **options) as run:
            out = run.executor.train_step(batches_of(2, packed=True, seed=1), seed=0)
            loss = out.result().loss
            for gradient in out.gradients:
                gradient.wait()
            found.append((loss, torch.cat([t.flatten() for t in run.gradients(out).values()])))
    assert len(found) == 4
    assert all(loss == found[0][0] and torch.equal(flat, found[0][1]) for loss, flat in found)


def test_what_is_on_the_device_is_set_by_the_group() -> None:
    """Layers four times as large because of four times as many experts, and as many times the groups."""
    taken = []
    for experts, groups in ((4, 2), (16, 8)):
        config = test_parity.MODELS["qwen3_moe"] | {"num_experts": experts, "intermediate_size": 16}
        with (
            mock.patch.dict(test_parity.SPECIAL, {"qwen3_moe large": config}),
            mock.patch.object(test_parity, "CpuDevice", CountingDevice),
        ):
            CountingDevice.taken = 0
            with streamed(
                "qwen3_moe large", weights=reference_model("qwen3_moe large"), micro_batches=2, slots=2,
                expert_groups=groups,
            ) as run:  # fmt: skip
                routers = sum(e.nbytes for e in run.model.anatomy.layers[0].layout.params if "gate.weight" in e.name)
                taken.append(CountingDevice.taken - (2 + 2) * routers)  # which do grow: slots, and an fp32 sum
    assert taken[0] == pytest.approx(taken[1], rel=0.02)


def planned_bytes(run: test_parity.Streamed, *, slices: int, groups: int) -> int:
    """Of everything that the executor allocates before its first step."""
    limit = Limit(1 << 40, "test")
    chosen = MemoryPlan(
        2, 2, 24, 2, 2, "device", 0, 1024, 48, 1, {}, {}, limit, limit, on_cpu=True, head_slices=slices,
        embedding_rows=VOCABULARY if slices else 0, expert_groups=groups,
    )  # fmt: skip
    terms = Terms(
        sizes=run.model.sizes, stem_shared=run.model.anatomy.stem_shared, dense_masks=False, context_bytes=0,
        process_bytes=0, libraries_bytes=0, reserve=0, moment_bytes=4, batch_tokens=96,
    )  # fmt: skip
    table = account(chosen, terms=terms).device
    fixed = ("weight slots", "stem and tail", "fp32 gradient sums", "gradient buffers", "slices of the head")
    tables = 8 * VOCABULARY if slices else 0  # made anew in every step
    return sum(table.get(purpose, 0) for purpose in (*fixed, "groups of experts")) - tables


@pytest.mark.parametrize(("groups", "slices"), [(2, 0), (3, 0), (4, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_counts_what_is_allocated(name: str, groups: int, slices: int) -> None:
    CountingDevice.taken = 0
    with (
        mock.patch.object(test_parity, "CpuDevice", CountingDevice),
        streamed(
            name, weights=reference_model(name), micro_batches=2, slots=2, head_slices=slices, expert_groups=groups
        ) as run,
    ):
        assert CountingDevice.taken == planned_bytes(run, slices=slices, groups=groups)


def test_a_closed_executor_leaves_nothing_on_the_device_and_the_model_can_be_bound_again() -> None:
    device = RememberingDevice()
    batches = batches_of(2, packed=True, seed=4)
    with (
        mock.patch.object(test_parity, "CpuDevice", return_value=device),
        streamed("mixtral", weights=reference_model("mixtral"), micro_batches=2, slots=2, expert_groups=3) as run,
    ):
        first = run.executor.train_step(batches, seed=0).result()
        run.executor.close()
        gc.collect()
        assert len(device.buffers) > 5
        assert not any(ref() is not None for ref in device.buffers)
        run.store.arena.rewind()
        again = StreamingExecutor(
            run.model,
            store=run.store,
            device=CpuDevice(),
            geometry=Geometry(2, 2, 2, 0, ROWS * test_parity.LENGTH, 1),
            updates=run.worker,
            poison=True,
        )
        second = again.train_step(batches, seed=0).result()
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
