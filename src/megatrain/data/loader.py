"""Which rows make up which step: a pure function of (seed, epoch, index), so a position is two numbers.

Letters: B rows of a micro-batch, S positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatrain.data.order import epoch_documents, row_order
from megatrain.data.packing import Rows, best_fit, one_each
from megatrain.data.samples import Indices, Samples
from megatrain.model.batch import IGNORE, MicroBatch
from megatrain.recipe import Recipe

_KEPT_EPOCHS = 2


@dataclass(frozen=True)
class StepBatch:
    """The rows of one optimizer step; each row is the documents in it."""

    samples: Samples
    rows: tuple[Indices, ...]  # indices of documents
    packed: bool
    max_seq_len: int
    pad_multiple: int

    @property
    def tokens(self) -> int:
        """Padding excluded."""
        return sum(int(self._lengths(row).sum()) for row in self.rows)

    @property
    def supervised(self) -> int:
        starts = self.samples.starts
        flags = self.samples.supervised
        return sum(int(np.count_nonzero(flags[starts[i] : starts[i + 1]])) for row in self.rows for i in row)

    def micro_batches(self, rows_per_micro: int) -> tuple[MicroBatch, ...]:
        """The step cut into micro-batches of so many rows, the last one perhaps smaller.

        Unpacked rows are sorted by length first, so that each micro-batch is padded as little as possible and
        the largest comes first.
        """
        return tuple(self._micro_batch(rows) for rows in self._cut(rows_per_micro))

    def origins(self, rows_per_micro: int) -> tuple[tuple[str, ...], ...]:
        """Where the documents of each of these micro-batches come from: "rows.jsonl: row 7"."""
        documents = ([self.samples[i] for row in rows for i in row] for rows in self._cut(rows_per_micro))
        return tuple(tuple(f"{sample.file}: row {sample.row}" for sample in part) for part in documents)

    def _cut(self, rows_per_micro: int) -> list[list[Indices]]:
        rows = list(self.rows)
        if not self.packed:
            rows.sort(key=lambda row: -int(self._lengths(row).sum()))  # stable: equal lengths keep their order
        return [rows[cut : cut + rows_per_micro] for cut in range(0, len(rows), rows_per_micro)]

    def _lengths(self, row: Indices) -> Indices:
        return self.samples.starts[row + 1] - self.samples.starts[row]

    def _micro_batch(self, rows: Sequence[Indices]) -> MicroBatch:
        used = [int(self._lengths(row).sum()) for row in rows]
        width = self.max_seq_len if self.packed else self._padded(max(used))
        input_ids = np.full((len(rows), width), self.samples.pad_id, np.int64)
        labels = np.full((len(rows), width), IGNORE, np.int64)
        position_ids = np.empty((len(rows), width), np.int64)
        for b, row in enumerate(rows):
            at = 0
            for document in row:
                part = slice(self.samples.starts[document], self.samples.starts[document + 1])
                tokens = self.samples.tokens[part]
                here = slice(at, at + len(tokens))
                input_ids[b, here] = tokens
                labels[b, here] = np.where(self.samples.supervised[part], tokens, IGNORE)
                position_ids[b, here] = np.arange(len(tokens))
                at += len(tokens)
            position_ids[b, at:] = np.arange(width - at)  # padding is one more document, which nobody sees
        padded = min(used) < width
        mask = (np.arange(width) < np.asarray(used)[:, None]).astype(np.int64) if padded else None
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(position_ids) if self.packed else None,
            attention_mask=None if mask is None else torch.from_numpy(mask),
            tokens=sum(used),
            supervised=int(np.count_nonzero(labels != IGNORE)),
        )

    def _padded(self, length: int) -> int:
        return min(-(-length // self.pad_multiple) * self.pad_multiple, max(self.max_seq_len, length))


class Loader:
    """The steps of each epoch. Epochs and steps count from 0."""

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        max_seq_len: int,
        packing: bool,
        shuffle: bool,
        seed: int,
        pad_multiple: int = 1,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.max_seq_len = max_seq_len
        self.packing = packing
        self.shuffle = shuffle
        self.seed = seed
        self.pad_multiple = pad_multiple
        self._epochs: dict[int, Rows] = {}

    @classmethod
    def of(cls, samples: Samples, *, recipe: Recipe, pad_multiple: int = 1) -> Loader:
        """The training rows in the steps that the recipe asks for."""
        return cls(
            samples,
            batch_size=recipe.train.batch_size,
            max_seq_len=recipe.data.max_seq_len,
            packing=recipe.data.packing,
            shuffle=recipe.data.shuffle,
            seed=recipe.train.seed,
            pad_multiple=pad_multiple,
        )

    @property
    def even(self) -> bool:
        """Whether every epoch has as many steps. Packed rows follow from the lengths drawn, which fractions change."""
        return not self.packing or all(weight == int(weight) for weight in self.samples.weights)

    def rows_in_epoch(self, epoch: int) -> int:
        return len(self._rows(epoch))

    def tokens_in_epoch(self, epoch: int) -> int:
        """Padding excluded; rows drawn twice count twice."""
        return int(self.samples.lengths[self._rows(epoch).documents].sum())

    def steps_in_epoch(self, epoch: int) -> int:
        """The last step of an epoch may be smaller than batch_size."""
        return -(-len(self._rows(epoch)) // self.batch_size)

    def step_batch(self, epoch: int, index: int) -> StepBatch:
        """Step `index` of an epoch. Raises IndexError beyond the last one."""
        rows = self._rows(epoch)
        first = index * self.batch_size
        if not 0 <= first < len(rows):
            raise IndexError(f"epoch {epoch} has {self.steps_in_epoch(epoch)} steps, not {index + 1}")
        chosen = tuple(rows[row] for row in range(first, min(first + self.batch_size, len(rows))))
        return StepBatch(self.samples, chosen, self.packing, self.max_seq_len, self.pad_multiple)

    def _rows(self, epoch: int) -> Rows:
        if epoch not in self._epochs:
            while len(self._epochs) >= _KEPT_EPOCHS:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._make(epoch)
        return self._epochs[epoch]

    def _make(self, epoch: int) -> Rows:
        documents = epoch_documents(self.samples, epoch=epoch, seed=self.seed, shuffle=self.shuffle)
        if not self.packing:
            return one_each(documents)
        rows = best_fit(
            documents,
            lengths=self.samples.lengths[documents],
            capacity=self.max_seq_len,
            longest_first=self.shuffle,
        )
        return rows.reordered(row_order(len(rows), epoch=epoch, seed=self.seed)) if self.shuffle else rows
