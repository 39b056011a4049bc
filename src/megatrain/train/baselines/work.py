"""What every baseline has in common: the work, the model, the loss of a micro-batch, the plain training step.

Letters: B sequences of a micro-batch, S tokens of each, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatrain.model.skeleton import ModelSpec, build_skeleton, load_config

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01
PATTERN = 1 << 22
"""Random numbers that fill the weights over and over: drawing billions would take longer than the benchmark."""


@dataclass(frozen=True)
class Work:
    """One step is `tokens_per_step` random tokens in sequences of `seq_len`, `micro_batch` sequences at a time."""

    model: str  # folder with config.json
    seq_len: int
    tokens_per_step: int
    micro_batch: int
    steps: int
    precision: str = "bf16"  # "bf16" | "fp32": what the device computes in
    max_grad_norm: float | None = 1.0
    config: dict[str, Any] = field(default_factory=dict)  # overrides of config.json
    other_vram_bytes: int = 0  # what the process that waits for us still holds on the device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences of each micro-batch; the last one may be smaller."""
        rows = self.tokens_per_step // self.seq_len
        return tuple(min(self.micro_batch, rows - at) for at in range(0, rows, self.micro_batch))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def accelerator() -> torch.device:
    """Where baselines compute: the GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def build_model(work: Work, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Hugging Face's own model with made-up weights, gradient checkpointing on, as the peers' own guides recommend."""
    config = load_config(work.model, revision="main", overrides=work.config, trust_remote_code=False)
    spec = ModelSpec(config=config, attention="sdpa", precision=dtype, training=True, compile=False)
    model: Any = build_skeleton(spec)
    _materialise(model, device=device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model.train()


def _materialise(model: nn.Module, *, device: torch.device) -> None:
    """Put every parameter and buffer on `device`; tensors that are tied stay tied."""
    pattern = (torch.randn(PATTERN, generator=torch.Generator().manual_seed(0)) * 0.02).to(device)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _filled(parameter, name=name, pattern=pattern)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                real = buffer if not buffer.is_meta else torch.zeros(buffer.shape, dtype=buffer.dtype)
                module._buffers[name] = real.to(device)


def _filled(parameter: nn.Parameter, *, name: str, pattern: Tensor) -> nn.Parameter:
    """Matrices N(0, 0.02), vectors 1, biases 0."""
    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=pattern.device)
    if value.dim() < 2:
        value.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        flat = value.view(-1)
        for first in range(0, flat.numel(), PATTERN):
            piece = flat[first : first + PATTERN]
            piece.copy_(pattern[: piece.numel()])
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def micro_batch(work: Work, *, rows: int, seed: int, vocabulary: int) -> Tensor:
    """ids [B, S] on the device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, work.seq_len), generator=generator)
    return ids.to(accelerator(), non_blocking=True)


def loss_of(model: Callable[..., Any], ids: Tensor, *, work: Work) -> Tensor:
    """The micro-batch's share of the step's mean cross-entropy. ids: [B, S]"""
    logits = model(input_ids=ids, use_cache=False).logits  # [B, S, V]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    return loss * (len(ids) * work.seq_len / work.tokens_per_step)


def plain_step(
    work: Work,
    *,
    model: Any,
    optimizer: torch.optim.Optimizer,
    number: int,
    before_backward: Callable[[bool], None] = lambda last: None,
) -> float:
    """Accumulate, clip, update, as a plain PyTorch loop does; returns the step's loss.

    before_backward: told whether this micro-batch is the step's last.
    """
    total = torch.zeros((), device=accelerator())
    for m, rows in enumerate(work.sizes):
        ids = micro_batch(work, rows=rows, seed=1000 * number + m, vocabulary=model.config.vocab_size)
        before_backward(m == len(work.sizes) - 1)
        loss = loss_of(model, ids, work=work)
        torch.autograd.backward(loss)
        total = total + loss.detach()
    if work.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), work.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(total)
