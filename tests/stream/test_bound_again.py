"""A model whose step ran out of memory within a layer, bound again: nothing of that step is left in it."""

from __future__ import annotations

from typing import Any

import pytest
import test_parity
import torch
from test_parity import batches_of, reference_model, streamed
from transformers.models.qwen3_moe import modeling_qwen3_moe

from megatrain.stream.device import CpuDevice
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry, StepNumbers

ROUTED = test_parity.MODELS["qwen3_moe"] | {"output_router_logits": True}


def step(monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None) -> StepNumbers:
    """The numbers of a step; with `fails_at`, of a second executor after the first had no memory for those experts."""
    batches = batches_of(2, packed=True, seed=4)
    with streamed("qwen3_moe routed", weights=reference_model("qwen3_moe routed"), micro_batches=2, slots=2) as run:
        if fails_at is None:
            return run.executor.train_step(batches, seed=0).result()
        called: list[object] = []
        forward = modeling_qwen3_moe.Qwen3MoeExperts.forward

        def full(module: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(module)
            if len(called) == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(module, *args, **kwargs)

        monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeExperts, "forward", full)
        with pytest.raises(torch.OutOfMemoryError):
            run.executor.train_step(batches, seed=0)
        run.executor.close()
        run.store.arena.rewind()
        geometry = Geometry(2, 2, 2, 0, 48, 1)
        again = StreamingExecutor(
            run.model, store=run.store, device=CpuDevice(), geometry=geometry, updates=run.worker, poison=True
        )
        return again.train_step(batches, seed=0).result()


@pytest.mark.parametrize("fails_at", [3, 10], ids=["forward", "backward"])
def test_router_logits_of_the_layer_that_failed_are_forgotten(monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    monkeypatch.setitem(test_parity.SPECIAL, "qwen3_moe routed", ROUTED)
    undisturbed = step(monkeypatch, fails_at=None)
    found = step(monkeypatch, fails_at=fails_at)
    assert found.aux_loss is not None
    assert (found.loss, found.grad_norm, found.aux_loss) == (
        undisturbed.loss,
        undisturbed.grad_norm,
        undisturbed.aux_loss,
    )
