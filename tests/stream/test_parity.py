"""The product's executor against plain Hugging Face and torch's AdamW: the same bits, whatever the memory plan.

fp32 on the CPU. Slots are NaN-filled on release. The reference runs in the same test with the same micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megatrain.host.arena import footprint
from megatrain.host.store import HostStore
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import load_kernel
from megatrain.optim.worker import OptimizerWorker
from megatrain.stream.device import CpuDevice, StreamName
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry, StepOutput

ROWS, LENGTH, VOCABULARY = 2, 24, 128
BETAS, EPS, DECAY, LR, CLIP = (0.9, 0.95), 1e-8, 0.1, 1e-3, 0.5
TIED_BOUND = 1e-7
"""Tied weights: layer-major order sums head and embedding gradients in another order (contract)."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
SPECIAL: dict[str, dict[str, object]] = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},  # tied, scaled embedding, soft-cap
    "gemma3_text": {"head_dim": 8},  # tied, scaled embedding
    "phi": {},  # a head with a bias
    "qwen3_moe routed": MODELS["qwen3_moe"] | {"output_router_logits": True, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 5, "sliding_window": None},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3},  # biases, of other dimensions
}
"""Heads of other kinds, see test_sliced.py, and experts, see test_streamed_experts.py."""


def config_of(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(name.split()[0], **{**COMMON, **(MODELS | SPECIAL)[name]})


def reference_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def batches_of(count: int, *, packed: bool, seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, :3] = IGNORE
        positions = None
        if packed:
            positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).repeat(ROWS, 1)
            labels[:, 9] = IGNORE
        out.append(MicroBatch(ids, labels, positions, None, ROWS * LENGTH, int((labels != IGNORE).sum())))
    return out


def reference_step(model: nn.Module, batches: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain Hugging Face: forward, token-normalised loss and backward per micro-batch, gradients accumulated."""
    model.zero_grad()
    total = torch.zeros(())
    supervised = sum(b.supervised for b in batches)
    for batch in batches:
        extra = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        logits = model(input_ids=batch.input_ids, use_cache=False, **extra).logits.float()
        target = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = loss / supervised
        loss.backward()
        total = total + loss.detach()
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


class Streamed:
    """The product's rooms around one tiny model."""

    def __init__(
        self,
        name: str,
        *,
        weights: nn.Module,
        micro_batches: int,
        slots: int,
        loads: int = 0,
        resident: int = 0,
        kept: int = 0,
        head_slices: int = 0,
        expert_groups: int = 0,
        buffers: int = 2,
        chunk: int = ROWS * LENGTH,
    ) -> None:
        device = CpuDevice()
        spec = ModelSpec(config_of(name), "auto", torch.float32, training=True, compile=False)
        self.model = StreamedModel.build(spec, rng=device.rng)
        input_bytes = ROWS * LENGTH * 32 * 4
        rows = 4 * micro_batches * footprint(input_bytes, pinned=True) + footprint(VOCABULARY * 32 * 4, pinned=True)
        self.store = HostStore.allocate(self.model.anatomy, pin=False, threads=1, extra_pinned_bytes=rows)
        state = dict(weights.named_parameters())
        for host in self.store.units:
            for entry in host.unit.layout.params:
                host.set_master(entry, state[host.unit.full_names[entry.name][0]].detach())
        optimizer = AdamW(
            self.store,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            decay_all=False,
            never_decay=frozenset(),
            kernel=load_kernel(threads=2),
        )
        self.worker = OptimizerWorker(optimizer, store=self.store)
        self.executor = StreamingExecutor(
            self.model,
            store=self.store,
            device=device,
            geometry=Geometry(
                micro_batches,
                slots,
                buffers,
                loads,
                head_chunk=chunk,
                input_bytes=input_bytes,
                resident=resident,
                kept=kept,
                head_slices=head_slices,
                embedding_rows=VOCABULARY if head_slices else 0,
                expert_groups=expert_groups,
            ),
            updates=self.worker,
            poison=True,
        )

    def named(self, of: Callable[[object], dict[str, Tensor]]) -> dict[str, Tensor]:
        return {host.unit.full_names[name][0]: tensor for host in self.store.units for name, tensor in of(host).items()}

    def gradients(self, out: StepOutput) -> dict[str, Tensor]:
        """Of a step whose gradients are complete, from the slabs of the store or of resident units."""
        slabs = {g.unit: g.resident.grad if g.resident else self.store.units[g.unit].grad for g in out.gradients}
        return self.named(lambda host: host.unit.layout.param_views(slabs[host.unit.index]))

    def weights(self) -> dict[str, Tensor]:
        return self.named(lambda host: host.unit.layout.param_views(host.hi))

    def submit(self, step: int, out: StepOutput, *, clip: float) -> None:
        self.worker.submit(step, out.gradients, lr=LR, clip=clip)


@contextmanager
def streamed(name: str, **options: object) -> Iterator[Streamed]:
    run = Streamed(name, **options)  # type: ignore[arg-type]
    yield run
    run.worker.drain()
    run.worker.close()
    run.store.close()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, tied: bool) -> int:
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        if tied and "embed_tokens" in name:
            assert (found[name] - tensor).abs().max() <= TIED_BOUND, name
        else:
            assert torch.equal(found[name], tensor), name
    return len(expected)


SHAPES = list(itertools.product((2, 3), (1, 3), (0, 2), (False, True)))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_plain_hugging_face(name: str) -> None:
    compared = 0
    for slots, micro_batches, loads, packed in SHAPES:
        reference = reference_model(name)
        batches = batches_of(micro_batches, packed=packed, seed=1)
        loss, expected = reference_step(reference, batches)
        with streamed(name, weights=reference, micro_batches=micro_batches, slots=slots, loads=loads) as run:
            out = run.executor.train_step(batches, seed=0)
            numbers = out.result()
            for gradient in out.gradients:
                gradient.wait()
            assert numbers.loss == float(loss)
            compared += assert_same(run.gradients(out), expected, tied="tied" in name)
            norm = nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
            assert numbers.grad_norm == pytest.approx(float(norm), rel=1e-6)
    assert compared == len(SHAPES) * len(list(reference_model(name).parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_three_clipped_steps_equal_torch_adamw_fed_the_same_gradients(name: str) -> None:
    reference = reference_model(name)
    with streamed(name, weights=reference, micro_batches=2, slots=2, loads=2) as run:
        decayed = [p for p in reference.parameters() if p.ndim >= 2]
        plain = [p for p in reference.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
        clipped = 0
        for step in range(3):
            out = run.executor.train_step(batches_of(2, packed=False, seed=step), seed=step)
            numbers = out.result()
            clip = min(1.0, CLIP / (numbers.grad_norm + 1e-6))
            clipped += clip < 1
            for gradient in out.gradients:
                gradient.wait()
            found = run.gradients(out)
            for parameter_name, parameter in reference.named_parameters():
                parameter.grad = found[parameter_name].clone() * torch.tensor(clip, dtype=torch.float32)
            run.submit(step + 1, out, clip=clip)
            optimizer.step()
        run.worker.drain()
        assert clipped == 3
        assert assert_same(run.weights(), dict(reference.named_parameters()), tied=False) > 20


RESIDENCE = [(1, 0), (3, 2), (5, 1), (5, 4), (6, 0), (6, 4)]
"""(resident units, kept layers) of four layers: the stem; two layers more; all layers; the tail as well."""


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_what_stays_on_the_device_changes_no_bit(name: str, *, packed: bool) -> None:
    """Losses, norms, weights and moments of three steps, an evaluation, the state brought home."""
    found = {}
    for resident, kept in [(0, 0), (0, 2), *RESIDENCE]:
        reference = reference_model(name)
        with streamed(name, weights=reference, micro_batches=2, slots=2, resident=resident, kept=kept) as run:
            numbers = []
            for step in range(3):
                out = run.executor.train_step(batches_of(2, packed=packed, seed=step), seed=step)
                one = out.result()
                numbers += [one.loss, one.grad_norm, one.aux_loss]
                run.submit(step + 1, out, clip=0.5)
                assert [g.unit for g in out.gradients if g.resident] == list(range(resident))
            numbers.append(run.executor.evaluate(batches_of(2, packed=packed, seed=9))[0])
            run.worker.drain()
            run.executor.bring_home()
            state = [(h.hi.clone(), h.exp_avg.clone(), h.exp_avg_sq.clone(), h.steps.clone()) for h in run.store.units]
        found[resident, kept] = numbers, state
    first_numbers, first_state = found.pop((0, 0))
    assert len(found) == len(RESIDENCE) + 1
    for case, (numbers, state) in found.items():
        assert numbers == first_numbers, case
        for unit, expected in zip(state, first_state, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(unit, expected, strict=True)), case


def test_nothing_of_a_resident_unit_crosses_the_link() -> None:
    copied: list[str] = []

    class Watched(CpuDevice):
        def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
            super().copy(target, source=source, on=on, reads=reads, writes=writes)
            copied.append(reads if reads.startswith("host") else writes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "CpuDevice", Watched)
        for resident, expected in ((0, 6), (3, 3), (6, 0)):
            copied.clear()
            with streamed(
                "llama", weights=reference_model("llama"), micro_batches=1, slots=2, resident=resident
            ) as run:
                run.executor.train_step(batches_of(1, packed=False, seed=0), seed=0).result()
                assert len({c for c in copied if c.startswith("host")}) == expected
                assert len({c for c in copied if c.startswith("slab")}) == expected


def test_evaluation_equals_plain_hugging_face_and_leaves_no_trace() -> None:
    reference = reference_model("llama")
    batches = batches_of(5, packed=True, seed=3)
    with streamed("llama", weights=reference, micro_batches=2, slots=2, loads=2) as run:
        before = {n: w.clone() for n, w in run.weights().items()}
        total, tokens = run.executor.evaluate(batches)
        with torch.no_grad():
            expected = 0.0
            for batch in batches:
                logits = reference(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
                target = F.pad(batch.labels[:, 1:], (0, 1), value=IGNORE).flatten()
                expected += float(F.cross_entropy(logits.flatten(0, 1), target, reduction="sum"))
        assert total == pytest.approx(expected, rel=1e-6)
        assert tokens == sum(b.supervised for b in batches)
        assert assert_same(run.weights(), before, tied=False) > 20
