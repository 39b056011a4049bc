"""FSDP2 on one GPU with CPU offload: page-locked, one unit per layer, prefetch as FSDP2 does it, fused CPU AdamW."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from megatrain.train.baselines.work import (
    LEARNING_RATE,
    build_model,
    measure,
    plain_step,
    work_from_arguments,
)


def main() -> None:
    work = work_from_arguments()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    torch.cuda.set_device(0)
    model = build_model(work, device="cpu").float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=True)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=mixed, offload_policy=offload)
    fully_shard(model, mp_policy=mixed, offload_policy=offload)
    for buffer_owner in model.modules():
        for name, buffer in buffer_owner._buffers.items():
            if buffer is not None:
                buffer_owner._buffers[name] = buffer.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    measure(work, name="fsdp", step=lambda number: plain_step(work, model=model, optimizer=optimizer, number=number))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
