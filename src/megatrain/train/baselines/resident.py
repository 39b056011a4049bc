"""Plain PyTorch with everything in VRAM: bf16 weights, fused AdamW, gradient checkpointing."""

from __future__ import annotations

import torch
from torch import nn

from megatrain.train.baselines.work import (
    CLIP,
    LEARNING_RATE,
    build_model,
    loss_of,
    measure,
    micro_batch,
    work_from_arguments,
)


def main() -> None:
    work = work_from_arguments()
    model = build_model(work, device="cuda")
    vocabulary = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(number: int) -> float:
        total = torch.zeros((), device="cuda")
        for m in range(work.micro_batches):
            loss = loss_of(
                model, micro_batch(work, seed=1000 * number + m, vocabulary=vocabulary), parts=work.micro_batches
            )
            torch.autograd.backward(loss)
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    measure(work, name="resident", step=step)


if __name__ == "__main__":
    main()
