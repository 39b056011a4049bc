from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.host import halves

BLOCK = 1 << 20


def halves_of(bits: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.from_numpy(bits.view(np.float32).copy())
    hi, lo = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    halves.split(values, hi=hi, lo=lo)
    return values, hi, lo


def check_block(first: int) -> None:
    bits = np.arange(first, first + BLOCK, dtype=np.uint64).astype(np.uint32)
    values, hi, lo = halves_of(bits)
    expected = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    assert np.array_equal(hi.view(torch.int16).numpy().view(np.uint16), expected)
    back = torch.full_like(values, 7.0)
    halves.join(hi, lo, out=back)
    assert np.array_equal(back.numpy().view(np.uint32), bits)


@pytest.mark.parametrize(
    "first", [0, 0x3F800000, 0x7F700000, 0x7F800000, 0x7FF00000, 0x80000000, 0xBF800000, 0xFF700000, 0xFFF00000]
)
def test_every_pattern_of_edge_blocks_comes_back(first: int) -> None:
    check_block(first)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_pattern_comes_back() -> None:
    for first in range(0, 1 << 32, BLOCK):
        check_block(first)


def test_ties_go_away_from_zero() -> None:
    _, hi, lo = halves_of(np.array([0x3F808000, 0xBF808000, 0x3F807FFF, 0x3F818000], dtype=np.uint32))
    patterns = hi.view(torch.int16).numpy().view(np.uint16)
    assert [hex(p) for p in patterns] == ["0x3f81", "0xbf81", "0x3f80", "0x3f82"]
    assert lo.tolist() == [-0x8000, -0x8000, 0x7FFF, -0x8000]


def test_bf16_values_are_their_own_high_half() -> None:
    source = torch.randn(1000, dtype=torch.float32).bfloat16()
    hi, lo = torch.empty_like(source), torch.ones(1000, dtype=torch.int16)
    halves.split(source.float(), hi=hi, lo=lo)
    assert torch.equal(hi, source)
    assert not lo.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_non_finite_values_are_found(bad: float, dtype: torch.dtype) -> None:
    values = torch.zeros(3 * halves.PIECE_ELEMS, dtype=dtype)
    assert halves.first_unfit(values, streamed=dtype) is None
    values[2 * halves.PIECE_ELEMS + 5] = bad
    assert halves.first_unfit(values, streamed=dtype) == 2 * halves.PIECE_ELEMS + 5


def test_fp32_that_rounds_to_an_infinite_bf16_does_not_fit_bf16_only() -> None:
    edge = torch.from_numpy(np.array([0x7F7F7FFF, 0x7F7F8000], dtype=np.uint32).view(np.float32))
    assert halves.first_unfit(edge, streamed=torch.bfloat16) == 1
    assert halves.first_unfit(-edge, streamed=torch.bfloat16) == 1
    assert halves.first_unfit(edge, streamed=torch.float32) is None
