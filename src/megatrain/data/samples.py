"""Tokenised rows in flat arrays: 5 bytes a token and 30 a row, whatever their number."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One document: a row, or a piece of one. The arrays are views."""

    tokens: Tokens  # [T]
    supervised: Flags  # [T]; the first token never is
    source: int  # index of its source in the recipe
    file: str
    row: int  # 1-based record of the file


@dataclass(frozen=True)
class Samples:
    """Documents in the order of the sources. Document i is tokens[starts[i]:starts[i + 1]]."""

    tokens: Tokens  # [all tokens]
    supervised: Flags  # [all tokens]
    starts: Indices  # [documents + 1]
    source: NDArray[np.int16]  # [documents]
    file: NDArray[np.int32]  # [documents], index into files
    row: Indices  # [documents]
    files: tuple[str, ...]
    weights: tuple[float, ...]  # of each source
    pad_id: int  # a token that exists; padding is never supervised nor seen

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: int) -> Sample:
        part = slice(self.starts[index], self.starts[index + 1])
        file = self.files[self.file[index]]
        return Sample(self.tokens[part], self.supervised[part], int(self.source[index]), file, int(self.row[index]))

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> Indices:  # [documents], tokens
        return np.diff(self.starts)

    @property
    def token_count(self) -> int:
        return int(self.starts[-1])

    @property
    def supervised_count(self) -> int:
        return int(np.count_nonzero(self.supervised))

    def fingerprint(self) -> str:
        """A hash of everything that training sees of the data: equal if and only if a resume may go on."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.tokens, self.supervised, self.starts, self.source):
            digest.update(np.ascontiguousarray(part).data)
        digest.update(repr((self.weights, self.pad_id)).encode())
        return digest.hexdigest()

    def select(self, chosen: Flags) -> Samples:  # chosen: [documents]
        """The documents that are chosen, in their order."""
        lengths = self.lengths
        tokens = np.repeat(chosen, lengths)
        return replace(
            self,
            tokens=self.tokens[tokens],
            supervised=self.supervised[tokens],
            starts=_starts(lengths[chosen]),
            source=self.source[chosen],
            file=self.file[chosen],
            row=self.row[chosen],
        )

    def record_of(self) -> Indices:
        """[documents] A number for each row of the data; the pieces of a row share it."""
        changes = np.diff(self.row) != 0
        changes |= (np.diff(self.file) != 0) | (np.diff(self.source) != 0)
        return np.concatenate([np.zeros(min(len(self), 1), np.int64), np.cumsum(changes, dtype=np.int64)])


class SamplesBuilder:
    """Collects documents batch by batch, so that no list of Python integers outlives its batch."""

    def __init__(self) -> None:
        self._tokens: list[Tokens] = []
        self._supervised: list[Flags] = []
        self._lengths, self._source, self._file, self._row = (array("q") for _ in range(4))
        self._files: dict[str, int] = {}
        self._sealed = 0  # so many arrays at the front are whole batches

    def add(self, pieces: Sequence[tuple[Tokens, Flags]], *, source: int, file: str, row: int) -> None:
        """The pieces of one row, in order."""
        number = self._files.setdefault(file, len(self._files))
        for tokens, supervised in pieces:
            self._tokens.append(tokens)
            self._supervised.append(supervised)
            self._lengths.append(len(tokens))
            self._source.append(source)
            self._file.append(number)
            self._row.append(row)

    def seal_batch(self) -> None:
        """Joins the small arrays of this batch into one."""
        sealed = self._sealed
        if len(self._tokens) - sealed > 1:
            self._tokens[sealed:] = [np.concatenate(self._tokens[sealed:])]
            self._supervised[sealed:] = [np.concatenate(self._supervised[sealed:])]
        self._sealed = len(self._tokens)

    def build(self, *, weights: tuple[float, ...], pad_id: int) -> Samples:
        tokens = np.concatenate(self._tokens) if self._tokens else np.empty(0, np.int32)
        self._tokens.clear()
        supervised = np.concatenate(self._supervised) if self._supervised else np.empty(0, np.bool_)
        return Samples(
            tokens=tokens,
            supervised=supervised,
            starts=_starts(np.asarray(self._lengths, np.int64)),
            source=np.asarray(self._source, np.int16),
            file=np.asarray(self._file, np.int32),
            row=np.asarray(self._row, np.int64),
            files=tuple(self._files),
            weights=weights,
            pad_id=pad_id,
        )


def _starts(lengths: Indices) -> Indices:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
