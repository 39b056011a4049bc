"""Best-fit packing: which documents share a row.

Each document goes into the row where it leaves the least room. With the longest first this is best-fit
decreasing, within 22 % of the fewest possible rows and a fraction of a percent on real data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatrain.data.samples import Indices

_BLOCK = 65_536


@dataclass(frozen=True)
class Rows:
    """Row r holds documents[starts[r]:starts[r + 1]], in this order."""

    documents: Indices  # [documents drawn]
    starts: Indices  # [rows + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Indices:
        return self.documents[self.starts[row] : self.starts[row + 1]]

    def reordered(self, order: Indices) -> Rows:
        """The same rows in another order: row i is what was row order[i]."""
        counts = np.diff(self.starts)[order]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        within = np.arange(len(self.documents)) - np.repeat(starts[:-1], counts)
        return Rows(self.documents[np.repeat(self.starts[:-1][order], counts) + within], starts)


def one_each(documents: Indices) -> Rows:
    """Every document in a row of its own."""
    return Rows(documents, np.arange(len(documents) + 1, dtype=np.int64))


def best_fit(documents: Indices, *, lengths: Indices, capacity: int, longest_first: bool) -> Rows:
    """Packs documents (lengths[i]: tokens of documents[i], at most capacity) into rows of `capacity` tokens.

    Rows come in the order in which their first document did. With longest_first documents of equal length keep
    their order; without it all do, as nearly as filling the rows allows.

    Rows with room r wait in queue r, and bit r of `waiting` says whether any do: the least room that suffices is
    the lowest bit at or above a length, so a document costs O(capacity / 64) machine words and no search.
    """
    order = np.argsort(-lengths, kind="stable") if longest_first else np.arange(len(lengths))
    row_of = np.empty(len(documents), np.int64)
    queues: dict[int, deque[int]] = {}
    waiting, rows = 0, 0
    for index, length in _pairs(order, lengths):
        suffices = waiting >> length
        if suffices:
            room = length + (suffices & -suffices).bit_length() - 1
            queue = queues[room]
            row = queue.popleft()
            if not queue:
                waiting ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        row_of[index] = row
        left = room - length
        if left:
            queues.setdefault(left, deque()).append(row)
            waiting |= 1 << left
    # Grouped by row; within a row, the order in which the documents were given.
    grouped = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=rows)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return Rows(documents[grouped], starts)


def _pairs(order: Indices, lengths: Indices) -> Iterator[tuple[int, int]]:
    """(index, length) in the order given, as Python integers, never many of them at once."""
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        yield from zip(block.tolist(), lengths[block].tolist(), strict=True)
