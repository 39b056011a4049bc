"""What is bf16 on the GPU and what is not, and how far streamed bf16 training is from plain bf16 training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sanitized_run import CONFIG, LENGTH, MICRO_BATCHES, ROWS
from transformers import AutoModelForCausalLM

from megatrain.host.arena import footprint
from megatrain.host.store import HostStore
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.stream.device_cuda import CudaDevice, open_cuda
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
NOISE = 0.02
"""bf16 rounds at 2^-9: gradients of two orders of the same sums differ by a few such roundings of their norm."""


def test_cuda_sanitizer_finds_nothing() -> None:
    env = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "sanitized_run.py")], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4 layers streamed" in done.stdout
    assert "data race" not in done.stderr


class _Done:
    def updated(self, unit: int) -> bool:
        return True

    def wait_updated(self, unit: int) -> None: ...


def test_streamed_bf16_is_within_noise_of_plain_bf16() -> None:
    device = CudaDevice(open_cuda(0), ceiling_bytes=None)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16, attn_implementation="sdpa").cuda().train()
    model = StreamedModel.build(ModelSpec(CONFIG, "sdpa", torch.bfloat16, True, False), rng=device.rng)
    input_bytes = ROWS * LENGTH * CONFIG.hidden_size * 2
    rows = 4 * MICRO_BATCHES * footprint(input_bytes, pinned=True)
    store = HostStore.allocate(model.anatomy, pin=True, threads=4, extra_pinned_bytes=rows)
    state = dict(plain.named_parameters())
    for host in store.units:
        for entry in host.unit.layout.params:
            host.set_master(entry, state[host.unit.full_names[entry.name][0]].detach().float().cpu())
    geometry = Geometry(MICRO_BATCHES, 2, 2, 2, head_chunk=32, input_bytes=input_bytes)
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=_Done(), poison=True)
    batches, total = [], 0.0
    for m in range(MICRO_BATCHES):
        ids = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(m))
        labels = ids.clone()
        labels[:, 0] = IGNORE
        batches.append(MicroBatch(ids, labels, None, None, ids.numel(), ROWS * (LENGTH - 1)))
    out = executor.train_step(batches, seed=0)
    numbers = out.result()
    for gradient in out.gradients:
        gradient.wait()
    supervised = sum(b.supervised for b in batches)
    for batch in batches:
        logits = plain(input_ids=batch.input_ids.cuda(), use_cache=False).logits.float()
        target = F.pad(batch.labels.cuda()[:, 1:], (0, 1), value=IGNORE).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), target, ignore_index=IGNORE, reduction="sum") / supervised
        loss.backward()
        total += float(loss.detach())
    assert numbers.loss == pytest.approx(total, rel=1e-3)
    compared = 0
    for host in store.units:
        assert host.unit.layout.elems == host.unit.layout.bf16_elems  # weights and slabs are bf16 throughout
        assert host.exp_avg.dtype is torch.float32
        for name, found in host.unit.layout.param_views(host.grad).items():
            expected = state[host.unit.full_names[name][0]].grad
            assert found.dtype is torch.bfloat16
            assert expected is not None
            difference = (found.float() - expected.float().cpu()).norm() / expected.float().norm().cpu()
            assert difference < NOISE, (name, float(difference))
            compared += 1
    assert compared == len(state)
    store.close()


def test_sums_on_the_device_are_fp32() -> None:
    device = CudaDevice(open_cuda(0), ceiling_bytes=None)
    model = StreamedModel.build(ModelSpec(CONFIG, "sdpa", torch.bfloat16, True, False), rng=device.rng)
    store = HostStore.allocate(model.anatomy, pin=True, threads=4)
    geometry = Geometry(1, 2, 2, 0, head_chunk=32, input_bytes=0)
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=_Done())
    assert {total.flat.dtype for total in executor._sums.values()} == {torch.float32}
    store.close()
