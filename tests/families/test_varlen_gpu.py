"""Attention within documents on CUDA: the kernel against masks, and a step that never waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drive import Streamed, differences, make_batches, reference_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from variants import config_of

pytestmark = pytest.mark.gpu


class CudaRng:
    def get(self) -> object:
        return torch.cuda.get_rng_state()

    def set(self, state: Any) -> None:
        torch.cuda.set_rng_state(state)


def _streamed(variant: str, *, attention: str, compile: bool = False) -> Streamed:
    config = config_of(variant, hidden_size=256, intermediate_size=512, head_dim=64)
    model = reference_model(config, attention="sdpa", dtype=torch.bfloat16)
    return Streamed(
        model,
        config=config,
        attention=attention,
        dtype=torch.bfloat16,
        compile=compile,
        device="cuda",
        rng=CudaRng(),
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
def test_kernel_gives_what_masks_give(variant: str, *, compiled: bool) -> None:
    """One causal, one sliding, one mixed family; bf16, so gradients agree to a few of its roundings."""
    batches = make_batches(2, packed=True, length=600)
    masked = _streamed(variant, attention="sdpa").step(batches)
    streamed = _streamed(variant, attention="megatrain_varlen", compile=compiled)
    assert streamed.model.attention == "megatrain_varlen"
    ours = streamed.step(batches)
    assert abs(float(ours.loss) - float(masked.loss)) < 2e-3
    for name, gap in differences(ours, masked).items():
        if name != "loss":
            assert gap <= 0.05 * float(masked.gradients[name].abs().max()), name


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_kept_attention_gives_what_a_recompute_gives(
    variant: str, *, compiled: bool, packed: bool, backend: SDPBackend
) -> None:
    """The same kernels on the same numbers; cuDNN's backward sums in no fixed order, so to a few roundings of bf16."""
    if packed and backend is SDPBackend.CUDNN_ATTENTION:
        pytest.skip("documents go to flash attention")
    batches = make_batches(2, packed=packed, length=640)
    streamed = _streamed(variant, attention="megatrain_varlen", compile=compiled)
    order = [backend, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        plain = streamed.step(batches)
        kept = streamed.step(batches, keep_attention=True)
    assert streamed.attention_calls == 2 * streamed.model.spec.config.num_hidden_layers
    assert abs(float(kept.loss) - float(plain.loss)) < 2e-3
    for name, gap in differences(kept, plain).items():
        if name != "loss":
            assert gap <= 0.03 * float(plain.gradients[name].abs().max()), name


def test_a_step_never_waits_for_the_device() -> None:
    streamed = _streamed("mistral", attention="megatrain_varlen")
    batches = make_batches(2, packed=True, length=600)
    streamed.step(batches, chunk=256)  # first calls allocate and initialise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        streamed.step(batches, chunk=256)
    finally:
        torch.cuda.set_sync_debug_mode("default")
