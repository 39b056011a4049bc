"""What a benchmark's steps train on, cut into micro-batches before any clock runs.

Letters: B rows of a micro-batch, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from megatrain.data import Loader, Prepared, load_tokenizer, prepare
from megatrain.data.loader import StepBatch
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.model.config_values import vocabulary
from megatrain.recipe import Recipe
from megatrain.train.build import PAD_MULTIPLE_CUDA
from megatrain.train.model_config import max_positions, read_config
from megatrain.train.planning import Planned

DIFFERENT = 2
"""Steps of random tokens that differ; they take turns."""


@dataclass(frozen=True)
class BenchTokens:
    """One step's micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int  # padding excluded
    positions: int  # padding included
    attended: float  # length of the document that a token is in, on average

    @classmethod
    def of(cls, micro_batches: tuple[MicroBatch, ...]) -> BenchTokens:
        tokens = sum(batch.tokens for batch in micro_batches)
        seen = sum(_seen(batch) for batch in micro_batches)
        return cls(micro_batches, tokens, sum(b.input_ids.numel() for b in micro_batches), 2 * seen / tokens - 1)


def random_tokens(planned: Planned) -> tuple[BenchTokens, ...]:
    """Steps of full rows of random tokens, every one supervised but the first of a row."""
    return tuple(_random_step(planned, seed=seed) for seed in range(DIFFERENT))


def _random_step(planned: Planned, *, seed: int) -> BenchTokens:
    chosen = planned.plan
    generator = torch.Generator().manual_seed(seed)
    known = planned.model.sizes.vocab_size
    left, out = planned.recipe.train.batch_size, []
    while left:
        rows = min(left, chosen.micro_batch)
        ids = torch.randint(0, known, (rows, chosen.seq_len), generator=generator)  # [B, S]
        labels = ids.clone()
        labels[:, 0] = IGNORE
        out.append(MicroBatch(ids, labels, None, None, ids.numel(), rows * (chosen.seq_len - 1)))
        left -= rows
    return BenchTokens.of(tuple(out))


def read_data(recipe: Recipe) -> Prepared:
    """The recipe's rows, tokenised. Raises DataError, ModelError."""
    config = read_config(recipe)
    return prepare(
        recipe,
        tokenizer=load_tokenizer(recipe),
        max_positions=max_positions(config),
        vocab_size=vocabulary(config),
    )


def recipe_tokens(planned: Planned, *, prepared: Prepared, count: int) -> tuple[BenchTokens, ...]:
    """The first `count` whole steps of the recipe's data, as the trainer would take them (fewer from short data)."""
    recipe = planned.recipe
    loader = Loader.of(prepared.train, recipe=recipe, pad_multiple=PAD_MULTIPLE_CUDA if planned.on_cuda else 1)
    chosen = list(islice(_whole_steps(loader), count)) or [loader.step_batch(0, 0)]
    return tuple(BenchTokens.of(tuple(rows.micro_batches(planned.plan.micro_batch))) for rows in chosen)


def _whole_steps(loader: Loader) -> Iterator[StepBatch]:
    """Steps of the first epoch, its smaller last one left out."""
    for index in range(loader.steps_in_epoch(0)):
        rows = loader.step_batch(0, index)
        if len(rows.rows) == loader.batch_size:
            yield rows


def _seen(batch: MicroBatch) -> int:
    """Tokens that the batch's tokens attend to, themselves included, in all."""
    ids, mask = batch.input_ids, batch.attention_mask
    positions = batch.position_ids if batch.position_ids is not None else torch.arange(ids.shape[1]).expand_as(ids)
    return int(((positions + 1) * (1 if mask is None else mask)).sum())
