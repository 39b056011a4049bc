"""Two steps of a small model, for `TORCH_CUDA_SANITIZER=1 python sanitized_run.py`: exits non-zero on a race.

Prints the number of layers, so that the caller sees that the steps really ran.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

from megatrain.host.arena import footprint
from megatrain.host.store import HostStore
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import load_kernel
from megatrain.optim.worker import OptimizerWorker
from megatrain.stream.device_cuda import CudaDevice, open_cuda
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry
from megatrain.train.bench import fill_synthetic

ROWS, LENGTH, MICRO_BATCHES = 2, 32, 2
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main() -> None:
    device = CudaDevice(open_cuda(0), ceiling_bytes=None)
    model = StreamedModel.build(ModelSpec(CONFIG, "sdpa", torch.bfloat16, True, False), rng=device.rng)
    input_bytes = ROWS * LENGTH * CONFIG.hidden_size * 2
    rows = len(model.anatomy.layers) * MICRO_BATCHES * footprint(input_bytes, pinned=True)
    store = HostStore.allocate(model.anatomy, pin=True, threads=4, extra_pinned_bytes=rows)
    fill_synthetic(store)
    optimizer = AdamW(
        store,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        decay_all=False,
        never_decay=frozenset(),
        kernel=load_kernel(threads=4),
    )
    worker = OptimizerWorker(optimizer, store=store)
    geometry = Geometry(MICRO_BATCHES, 2, 2, 2, head_chunk=32, input_bytes=input_bytes)
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=worker)
    for step in range(2):
        batches = []
        for m in range(MICRO_BATCHES):
            ids = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + m))
            labels = ids.clone()
            labels[:, 0] = IGNORE
            batches.append(MicroBatch(ids, labels, None, None, ids.numel(), ROWS * (LENGTH - 1)))
        out = executor.train_step(batches, seed=step)
        numbers = out.result()
        assert numbers.finite
        worker.submit(step + 1, out.gradients, lr=1e-3, clip=1.0)
    worker.drain()
    worker.close()
    device.synchronize()
    store.close()
    print(f"{len(model.anatomy.layers)} layers streamed")


if __name__ == "__main__":
    main()
