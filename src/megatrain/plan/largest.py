"""`--max`: the largest batch, the longest context and the largest model of a shape that a machine has room for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatrain.model.sizes_types import ExpertSizes, ModelSizes, SliceSizes, TileSizes, UnitSizes
from megatrain.plan.cutting import attempt
from megatrain.plan.job import Job

ROUND_TOKENS = 256
MOST_ROWS = 1 << 20
MOST_TOKENS = 1 << 24
SCALES = 1000
"""Model sizes are tried in steps of 1/100 of the width, up to ten times the shape that was given."""


@dataclass(frozen=True)
class Largest:
    """0 where not even the smallest fits. `how` says what each of them means."""

    micro_batch: int
    batch_size: int
    max_seq_len: int
    model_params: int
    model_layers: int
    model_hidden: int
    how: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_largest(job: Job) -> Largest:
    """Each alone, everything else as in `job`; only what must is in host memory."""
    job = replace(job, can_reside=False, resumed=None)
    batch = _most(MOST_ROWS, fits=lambda n: _fits(_one_row(job, batch_size=n)))
    micro = _most(MOST_ROWS, fits=lambda n: _fits(_whole_step(job, rows=n)))
    tokens = _most(
        MOST_TOKENS // ROUND_TOKENS,
        fits=lambda n: _fits(_one_row(replace(job, seq_len=n * ROUND_TOKENS), batch_size=1)),
    )
    scale = _most(SCALES, fits=lambda n: _fits(replace(_one_row(job), sizes=scaled(job.sizes, n / 100))))
    model = scaled(job.sizes, scale / 100) if scale else None
    return Largest(
        micro_batch=micro,
        batch_size=batch,
        max_seq_len=tokens * ROUND_TOKENS,
        model_params=model.params_total if model else 0,
        model_layers=len(model.layers) if model else 0,
        model_hidden=model.hidden_numel_per_token if model else 0,
        how={
            "micro_batch": f"rows of {job.seq_len} tokens on the device at once, the step being one micro-batch",
            "batch_size": f"rows of {job.seq_len} tokens a step, as many micro-batches as it takes",
            "max_seq_len": f"tokens of one row, a step being one row, in steps of {ROUND_TOKENS}",
            "model": (
                "this shape with width and depth scaled together (layers grow with the square of the width, the "
                f"vocabulary stays), {job.batch_size} rows of {job.seq_len} tokens a step"
            ),
        },
    )


def scaled(sizes: ModelSizes, scale: float) -> ModelSizes:
    """`scale` times as wide and as deep: a layer's matrices grow with its square, embedding and head with `scale`."""
    kinds = sizes.layers
    count = max(1, round(len(kinds) * scale))
    layers = tuple(_times(kinds[i % len(kinds)], scale * scale) for i in range(count))
    stem, tail = _times(sizes.stem, scale), _times(sizes.tail, scale)
    total = sum(u.elems for u in (stem, *layers, tail))
    share = sizes.params_active / sizes.params_total
    width = max(1, round(sizes.hidden_numel_per_token * scale))
    return replace(
        sizes,
        stem=stem,
        layers=layers,
        tail=tail,
        hidden_numel_per_token=width,
        hidden_bytes_per_token=width * (sizes.hidden_bytes_per_token // sizes.hidden_numel_per_token),
        params_total=total,
        params_trainable=total,
        params_active=round(total * share),
        saved_bytes_per_token=round(sizes.saved_bytes_per_token * scale),
        widest_bytes_per_token=round(sizes.widest_bytes_per_token * scale),
        attention_bytes_per_token=round(sizes.attention_bytes_per_token * scale),
        attention_layers=round(count * sizes.attention_layers / len(kinds)),
        slicing=None if sizes.slicing is None else _narrower(sizes.slicing, scale),
        experts=None if sizes.experts is None else _smaller(sizes.experts, scale, layers=count),
        tiling=None if sizes.tiling is None else _other_tiles(sizes.tiling, scale),
    )


def _other_tiles(tiling: TileSizes, scale: float) -> TileSizes:
    rest, mlp = (round(size * scale) for size in (tiling.rest_bytes_per_token, tiling.mlp_bytes_per_token))
    return TileSizes(rest, mlp, round(tiling.elems * scale * scale))


def _smaller(experts: ExpertSizes, scale: float, *, layers: int) -> ExpertSizes:
    """As many experts, each `scale` times as wide both ways."""
    rest = experts.rest
    return replace(
        experts,
        elems=tuple(int(elems * scale * scale) for elems in experts.elems),
        rest=tuple(_times(rest[i % len(rest)], scale * scale) for i in range(layers)),
        rest_bytes_per_token=round(experts.rest_bytes_per_token * scale),
        expert_bytes_per_token=round(experts.expert_bytes_per_token * scale),
    )


def _narrower(slicing: SliceSizes, scale: float) -> SliceSizes:
    """Rounded down: head and embedding are parts of the units, which must not be smaller than they."""
    head, embedding = (int(width * scale) for width in (slicing.head_width, slicing.embedding_width))
    return replace(slicing, head_width=head, embedding_width=embedding)


def _times(unit: UnitSizes, factor: float) -> UnitSizes:
    def grown(number: int) -> int:
        return round(number * factor / 128) * 128

    return replace(
        unit,
        elems=grown(unit.elems),
        bf16_elems=grown(unit.bf16_elems),
        streamed_bytes=grown(unit.streamed_bytes),
        param_bytes=grown(unit.param_bytes),
    )


def _one_row(job: Job, *, batch_size: int | None = None) -> Job:
    """The cut that takes least of the device, unless the recipe states one."""
    memory = job.memory if job.memory.micro_batch != "auto" else replace(job.memory, micro_batch=1)
    return replace(job, memory=memory, batch_size=job.batch_size if batch_size is None else batch_size)


def _whole_step(job: Job, *, rows: int) -> Job:
    return replace(job, memory=replace(job.memory, micro_batch=rows), batch_size=rows)


def _fits(job: Job) -> bool:
    return attempt(job).fits


def _most(most: int, *, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where smaller ones fit too; 0 if none does."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
