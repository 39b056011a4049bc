"""FSDP2 on one GPU with CPU offload: page-locked, one unit per layer, prefetch as FSDP2 does it, fused CPU AdamW.

Masters and moments are fp32 on the host. Within a step gradients are accumulated on the device and go home with the
last micro-batch, as FSDP2's documentation recommends for gradient accumulation.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from megatrain.train.baselines.child import begin, measure
from megatrain.train.baselines.work import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Work,
    accelerator,
    build_model,
    plain_step,
)


def shard(model: Any, *, work: Work) -> None:
    """A unit per decoder layer, and one for the rest; buffers go to the device, where the model computes."""
    device = accelerator()
    mesh = init_device_mesh(device.type, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=work.dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=True) if device.type == "cuda" else OffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for owner in model.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def main() -> None:
    work = begin()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = build_model(work, device=torch.device("cpu"), dtype=torch.float32)
        shard(model, work=work)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

        def step(number: int) -> float:
            return plain_step(
                work,
                model=model,
                optimizer=optimizer,
                number=number,
                before_backward=model.set_requires_gradient_sync,
            )

        measure(work, name="fsdp", step=step)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
