"""The order of an epoch, from the seed alone: no generator whose state would have to be saved, on any numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatrain.data.samples import Flags, Indices, Samples

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def hashes(count: int, *, seed: int, stream: int) -> NDArray[np.uint64]:
    """[count] Independent-looking 64-bit numbers (splitmix64, Steele, Lea and Flood 2014)."""
    state = _mix_one((seed + _GOLDEN * (stream + 1)) & _MASK)
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def shuffled(count: int, *, seed: int, stream: int) -> Indices:
    """[count] A permutation."""
    return np.argsort(hashes(count, seed=seed, stream=stream), kind="stable").astype(np.int64)


def epoch_documents(samples: Samples, *, epoch: int, seed: int, shuffle: bool) -> Indices:
    """The documents of an epoch in their order, as indices.

    A weight of 2.5 draws each row of a source twice and half of them, others in each epoch, a third time.
    """
    parts = []
    for number, weight in enumerate(samples.weights):
        own = np.flatnonzero(samples.source == number).astype(np.int64)
        whole = int(weight)
        extra = round((weight - whole) * len(own))
        parts.append(np.tile(own, whole))
        if extra:
            order = shuffled(len(own), seed=seed, stream=_stream(epoch, purpose=1 + number))
            parts.append(own[np.sort(order[:extra])])
    drawn = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not shuffle:
        return drawn
    return drawn[shuffled(len(drawn), seed=seed, stream=_stream(epoch, purpose=0))]


def row_order(count: int, *, epoch: int, seed: int) -> Indices:
    """[count] The order of an epoch's packed rows."""
    return shuffled(count, seed=seed, stream=_stream(epoch, purpose=2**15))


def hold_out(samples: Samples, *, fraction: float, seed: int) -> Flags:
    """[documents] Which documents are held out: whole rows of the data, at least one, never all."""
    record = samples.record_of()
    records = int(record[-1]) + 1 if len(record) else 0
    count = min(max(round(fraction * records), 1), records - 1)
    held = np.zeros(records, np.bool_)
    held[shuffled(records, seed=seed, stream=_MASK)[: max(count, 0)]] = True
    return held[record]


def _stream(epoch: int, *, purpose: int) -> int:
    return (epoch << 16) + purpose


def _mix_one(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
