"""Plain PyTorch with everything in VRAM: bf16 weights, fused AdamW, gradient checkpointing."""

from __future__ import annotations

import torch

from megatrain.train.baselines.work import (
    LEARNING_RATE,
    build_model,
    measure,
    plain_step,
    work_from_arguments,
)


def main() -> None:
    work = work_from_arguments()
    model = build_model(work, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    measure(
        work, name="resident", step=lambda number: plain_step(work, model=model, optimizer=optimizer, number=number)
    )


if __name__ == "__main__":
    main()
