"""Plain PyTorch with everything on the device: bf16 weights and moments, fused AdamW, gradient checkpointing."""

from __future__ import annotations

import torch

from megatrain.train.baselines.child import begin, measure
from megatrain.train.baselines.work import LEARNING_RATE, WEIGHT_DECAY, accelerator, build_model, plain_step


def main() -> None:
    work = begin()
    model = build_model(work, device=accelerator(), dtype=work.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    measure(
        work, name="resident", step=lambda number: plain_step(work, model=model, optimizer=optimizer, number=number)
    )


if __name__ == "__main__":
    main()
