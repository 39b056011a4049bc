"""Moments in bf16, rounded stochastically: the definition, in plain torch, on any device.

Rounding to nearest would freeze a second moment: with beta2 = 0.999 it moves by less than 0.1 % a step, and a bf16 is
spaced by 0.4 to 0.8 %. So a new moment x is rounded up with the probability of its place between its two bf16
neighbours, and down otherwise: the expectation is x. On the fp32 bits that is an addition and a cut::

    bf16 = (bits + r) >> 16            r: 16 random bits

The random bits are a hash, not a stream: one word per element gives `r` of both moments, and depends only on the run's
seed, the unit, the number of the update and the element's place in the unit. So threads, instruction paths, the
grouping of parameters and the place where a run was interrupted change no bit. The hash is made of 32-bit operations
alone, which every vector unit and every GPU has: the function "lowbias32" (C. Wellons, Prospecting for hash functions,
2018) of the element's number, with one half of the key put in before and the other half on the way::

    h = element ^ key0                 element: its number in the unit, mod 2^32
    h = (h ^ h >> 16) * 0x7feb352d
    h = (h ^ h >> 15) + key1
    h = h * 0x846ca68b
    h = h ^ h >> 16                    low half: first moment; high half: second moment

What is a bf16 already never moves. From the largest finite bf16 up, the low bits are cut: a larger finite number
becomes the largest bf16 and never infinite, infinity stays, and so does a NaN (what arithmetic makes is quiet).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = 0x7F7F0000  # the largest finite bf16, as fp32 bits
_MAGNITUDE = 0x7FFFFFFF
_FIRST_FACTOR = 0x7FEB352D
_SECOND_FACTOR = 0x846CA68B - (1 << 32)  # as int32, as are all words here


@dataclass(frozen=True)
class Draws:
    """Where the random bits of a run of elements come from."""

    key0: int  # 32 bits each
    key1: int
    first: int  # the number, in its unit, of the run's first element

    @classmethod
    def of(cls, *, seed: int, unit: int, step: int, first: int) -> Draws:
        """Of update number `step` of parameters of a unit, in a run of that seed."""
        digest = hashlib.sha256(f"moments:{seed}:{unit}:{step}".encode()).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"), first)

    def skip(self, elements: int) -> Draws:
        """The same for a run that begins `elements` later."""
        return Draws(self.key0, self.key1, self.first + elements)

    def words(self, n: int, *, device: torch.device | None = None) -> Tensor:
        """The first n random words: int32 [n]."""
        words = torch.arange(n, dtype=torch.int32, device=device)
        words += _signed(self.first)
        words ^= _signed(self.key0)
        words ^= _shifted(words, 16)
        words *= _FIRST_FACTOR
        words ^= _shifted(words, 15)
        words += _signed(self.key1)
        words *= _SECOND_FACTOR
        words ^= _shifted(words, 16)
        return words


def round_moments(average: Tensor, square: Tensor, *, draws: Draws, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Keep new moments. average, square: fp32 [n]; exp_avg, exp_avg_sq: bf16 [n], written; all contiguous."""
    words = draws.words(average.numel(), device=average.device)
    _round(average, random=words & 0xFFFF, out=exp_avg)
    _round(square, random=_shifted(words, 16), out=exp_avg_sq)


def _round(values: Tensor, *, random: Tensor, out: Tensor) -> None:
    """values: fp32 [n]; random: int32 [n] in [0, 2^16), overwritten; out: bf16 [n]."""
    bits = values.view(torch.int32)
    random.masked_fill_((bits & _MAGNITUDE) >= _LARGEST, 0)
    random += bits
    out.view(torch.int16).copy_(random >> 16)  # an arithmetic shift: the result fits into 16 signed bits


def _shifted(words: Tensor, places: int) -> Tensor:
    """words >> places as if they were unsigned."""
    return (words >> places) & ((1 << 32 - places) - 1)


def _signed(word: int) -> int:
    """The int32 of the same 32 bits."""
    return ((word + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
