"""What every baseline has in common: the model, the tokens, the loss, the clock.

A baseline is run as ``python -m megatrain.train.baselines.NAME WORK.json`` and prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

WARMUP_STEPS = 2
LEARNING_RATE = 1e-5
CLIP = 1.0


@dataclass(frozen=True)
class Work:
    """One step is `tokens_per_step` random tokens in sequences of `seq_len`, `micro_batch` sequences at a time."""

    model: str  # folder with config.json
    seq_len: int
    tokens_per_step: int
    micro_batch: int
    steps: int

    @property
    def micro_batches(self) -> int:
        return self.tokens_per_step // self.seq_len // self.micro_batch

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def build_model(work: Work, *, device: str) -> Any:
    """Randomly initialised, bf16, gradient checkpointing on, as the peers' own guides recommend."""
    config = AutoConfig.from_pretrained(work.model)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def micro_batch(work: Work, *, seed: int, vocabulary: int) -> Tensor:
    """ids [micro_batch, seq_len] on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (work.micro_batch, work.seq_len), generator=generator)
    return ids.cuda(non_blocking=True)


def loss_of(model: nn.Module, ids: Tensor, *, parts: int) -> Tensor:
    """Mean cross-entropy of the micro-batch over the number of micro-batches."""
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()) / parts


def plain_step(work: Work, *, model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Accumulate, clip, update, as a plain PyTorch loop does; returns the step's loss."""
    total = torch.zeros((), device="cuda")
    for m in range(work.micro_batches):
        ids = micro_batch(work, seed=1000 * number + m, vocabulary=model.config.vocab_size)
        loss = loss_of(model, ids, parts=work.micro_batches)
        torch.autograd.backward(loss)
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)


def measure(work: Work, *, name: str, step: Callable[[int], float]) -> None:
    """Warm up, time, print. `step(number)` runs one optimizer step and returns its loss."""
    losses = [step(n) for n in range(WARMUP_STEPS)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for n in range(work.steps):
        began = time.perf_counter()
        losses.append(step(n))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    host = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    median = statistics.median(times)
    result = {
        "baseline": name,
        "step_s": median,
        "step_s_min": min(times),
        "step_s_max": max(times),
        "tokens_per_s": work.tokens_per_step / median,
        "vram_peak_bytes": torch.cuda.max_memory_reserved() + context,
        "host_peak_bytes": int(host.split()[1]) * 1024,
        "losses": losses,
    }
    print(json.dumps(result), flush=True)


def work_from_arguments() -> Work:
    return Work.read(Path(sys.argv[1]))
