"""Models, machines and jobs in integers, for tests of planning."""

from __future__ import annotations

from typing import Any

from megatrain.model.sizes_types import ModelSizes, UnitSizes
from megatrain.plan.hardware import DeviceMemory, HostMemory, Limit
from megatrain.plan.job import Job, Limits, Settings

MIB = 1 << 20
GIB = 1 << 30


def unit(name: str, elems: int, *, fp32: bool = False, buffers: int = 0) -> UnitSizes:
    param_bytes = elems * (4 if fp32 else 2)
    return UnitSizes(
        name=name,
        elems=elems,
        bf16_elems=0 if fp32 else elems,
        streamed_bytes=param_bytes + buffers,
        param_bytes=param_bytes,
        params=9,
    )


def model(*, hidden: int, layer: int, layers: int, vocab: int, saved: int, fp32: bool = False) -> ModelSizes:
    outer = vocab * hidden
    total = 2 * outer + layers * layer + hidden
    return ModelSizes(
        stem=unit("stem", outer, fp32=fp32),
        layers=tuple(unit(f"layer {i}", layer, fp32=fp32) for i in range(layers)),
        tail=unit("tail", outer + hidden, fp32=fp32),
        hidden_numel_per_token=hidden,
        hidden_bytes_per_token=hidden * (4 if fp32 else 2),
        vocab_size=vocab,
        params_total=total,
        params_trainable=total,
        params_active=total,
        saved_bytes_per_token=saved,
        config_hash="test",
    )


SEVEN_B = model(hidden=3584, layer=233_057_792, layers=28, vocab=152_064, saved=232_456)
HALF_B = model(hidden=896, layer=14_912_384, layers=24, vocab=151_936, saved=60_000)
TINY = model(hidden=128, layer=200_000, layers=4, vocab=2048, saved=20_000, fp32=True)


def limits(host: int = 128 * GIB, *, vram: int | None = 140 * GIB, page_lock: Limit | None = None) -> Limits:
    memory = Limit(host, "MemTotal")
    return Limits(
        host=HostMemory(limit=memory, available=memory, process_bytes=GIB // 2, may_grow=False),
        device=None if vram is None else DeviceMemory(vram, vram, "cuda:0"),
        threads=14,
        page_lock=page_lock,
    )


def job(sizes: ModelSizes = SEVEN_B, *, batch: int = 32, seq: int = 2048, **changes: Any) -> Job:
    """With everything at auto on a large GPU; settings of the memory section and fields of Job by name."""
    names = set(Settings.__dataclass_fields__)
    settings = Settings(**{k: v for k, v in changes.items() if k in names})
    rest = {k: v for k, v in changes.items() if k not in names}
    defaults = {"packed": False, "limits": limits(), "dense_masks": False, "can_reside": True}
    return Job(sizes, memory=settings, batch_size=batch, seq_len=seq, **{**defaults, **rest})
