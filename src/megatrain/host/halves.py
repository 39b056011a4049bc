"""An fp32 number as two 16-bit halves: the bf16 that is streamed, and what rounding took away.

``hi = (bits + 0x8000) >> 16`` is the bf16 pattern, rounded half away from zero; ``lo`` is the low half of
the bits as a signed number, so ``bits = (hi << 16) + lo`` (mod 2**32) gives every fp32 pattern back.
A finite number above the largest bf16 gets an infinite ``hi``, and some NaNs lose their NaN-ness in it:
both are refused where weights come in (`first_unfit`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PIECE_ELEMS = 1 << 18
"""Elements converted at a time: the temporaries stay in the cache."""

_ROUND = np.uint32(0x8000)
_SIXTEEN = np.uint32(16)
_BF16_EXPONENT = np.uint16(0x7F80)
_FP32_EXPONENT = np.uint32(0x7F800000)
_FP32_TOO_BIG = np.uint32(0x7F7F8000)  # the smallest magnitude whose bf16 rounds to infinity
_FP32_MAGNITUDE = np.uint32(0x7FFFFFFF)


def split(values: Tensor, *, hi: Tensor, lo: Tensor) -> None:
    """Write the halves of `values`. values: fp32 [n]; hi: bf16 [n]; lo: int16 [n]; all contiguous, on the CPU."""
    bits, high, low = _bits32(values), _bits16(hi), lo.numpy().reshape(-1)
    for piece in _pieces(len(bits)):
        word = bits[piece]
        high[piece] = (word + _ROUND) >> _SIXTEEN
        low[piece] = word.astype(np.uint16).view(np.int16)


def join(hi: Tensor, lo: Tensor, *, out: Tensor) -> None:
    """The inverse of `split`. hi: bf16 [n]; lo: int16 [n]; out: fp32 [n]; all contiguous, on the CPU."""
    bits, high, low = _bits32(out), _bits16(hi), lo.numpy().reshape(-1)
    for piece in _pieces(len(bits)):
        word = high[piece].astype(np.uint32) << _SIXTEEN
        bits[piece] = word + low[piece].astype(np.int32).view(np.uint32)


def first_unfit(values: Tensor, *, streamed: torch.dtype) -> int | None:
    """Index of the first value that cannot be a weight: NaN, infinite, or infinite once rounded to `streamed`.

    values: bf16 or fp32 [n], contiguous, on the CPU. Looks at bit patterns only, piece by piece.
    """
    if values.dtype is torch.bfloat16:
        return _first_at_least(_bits16(values), limit=_BF16_EXPONENT, mask=_BF16_EXPONENT)
    limit = _FP32_TOO_BIG if streamed is torch.bfloat16 else _FP32_EXPONENT
    return _first_at_least(_bits32(values), limit=limit, mask=_FP32_MAGNITUDE)


def _first_at_least(
    patterns: NDArray[Any], *, limit: np.unsignedinteger[Any], mask: np.unsignedinteger[Any]
) -> int | None:
    for piece in _pieces(len(patterns)):
        above = (patterns[piece] & mask) >= limit
        if above.any():
            return int(piece.start) + int(above.argmax())
    return None


def _pieces(n: int) -> list[slice]:
    return [slice(a, min(a + PIECE_ELEMS, n)) for a in range(0, n, PIECE_ELEMS)]


def _bits16(values: Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = values.view(torch.int16).numpy().reshape(-1).view(np.uint16)
    return bits


def _bits32(values: Tensor) -> NDArray[np.uint32]:
    bits: NDArray[np.uint32] = values.numpy().reshape(-1).view(np.uint32)
    return bits
