"""DeepSpeed ZeRO-3 with parameters and optimizer in page-locked host memory and its own CPU Adam."""

from __future__ import annotations

import os
from typing import Any

import torch

from megatrain.train.baselines.work import (
    CLIP,
    LEARNING_RATE,
    Work,
    build_model,
    loss_of,
    measure,
    micro_batch,
    work_from_arguments,
)


def settings(work: Work) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload,
            "offload_param": offload,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": 100_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        },
    }


def main() -> None:
    import deepspeed

    work = work_from_arguments()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29518", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    model = build_model(work, device="cpu")
    vocabulary = model.config.vocab_size
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings(work))

    def step(number: int) -> float:
        total = torch.zeros((), device="cuda")
        for m in range(work.micro_batches):
            ids = micro_batch(work, seed=1000 * number + m, vocabulary=vocabulary)
            loss = loss_of(engine, ids, parts=1)  # the engine divides by the accumulation steps
            engine.backward(loss)
            engine.step()
            total = total + loss.detach() / work.micro_batches
        return float(total)

    measure(work, name="deepspeed", step=step)


if __name__ == "__main__":
    main()
