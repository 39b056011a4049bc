"""DeepSpeed ZeRO-3 with parameters and optimizer in page-locked host memory and its own CPU Adam."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from megatrain.train.baselines.child import begin, measure
from megatrain.train.baselines.work import LEARNING_RATE, WEIGHT_DECAY, Work, build_model, loss_of, micro_batch


def settings(work: Work) -> dict[str, Any]:
    """The configuration of DeepSpeed's ZeRO-Offload guide; what is not named here is DeepSpeed's default."""
    offload = {"device": "cpu", "pin_memory": True}
    clipping = {} if work.max_grad_norm is None else {"gradient_clipping": work.max_grad_norm}
    return clipping | {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": len(work.sizes),
        "bf16": {"enabled": work.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500_000_000,
            "sub_group_size": 1_000_000_000,
            "stage3_prefetch_bucket_size": 100_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        },
    }


def main() -> None:
    work = begin()
    import deepspeed

    with socket.socket() as probe:  # a port that is free: two benchmarks may run on one host
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    model = build_model(work, device=torch.device("cpu"), dtype=work.dtype)
    vocabulary, parts = model.config.vocab_size, len(work.sizes)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings(work))

    def step(number: int) -> float:
        total = torch.zeros((), device="cuda")
        for m, rows in enumerate(work.sizes):
            ids = micro_batch(work, rows=rows, seed=1000 * number + m, vocabulary=vocabulary)
            loss = loss_of(engine, ids, work=work)
            engine.backward(loss * parts)  # the engine divides by the accumulation steps
            engine.step()
            total = total + loss.detach()
        return float(total)

    measure(work, name="deepspeed", step=step)


if __name__ == "__main__":
    main()
