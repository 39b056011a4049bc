"""Packing: every document once, no row over its capacity, nearly no room left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.packing import Rows, best_fit, one_each

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def packed(lengths: list[int] | np.ndarray, *, capacity: int = 40, longest_first: bool = True) -> Rows:
    sizes = np.asarray(lengths, np.int64)
    return best_fit(np.arange(len(sizes)), lengths=sizes, capacity=capacity, longest_first=longest_first)


def best_fit_by_search(lengths: list[int], *, order: list[int], capacity: int) -> list[int]:
    """Room left in each row, by trying every row."""
    room: list[int] = []
    for index in order:
        fitting = [row for row, left in enumerate(room) if left >= lengths[index]]
        if fitting:
            row = min(fitting, key=lambda r: room[r])
        else:
            row = len(room)
            room.append(capacity)
        room[row] -= lengths[index]
    return sorted(room)


@given(lengths=LENGTHS, longest_first=st.booleans())
def test_every_document_once_and_no_row_too_full(lengths: list[int], longest_first: bool) -> None:
    rows = packed(lengths, longest_first=longest_first)
    assert sorted(np.concatenate([rows[r] for r in range(len(rows))]).tolist() if lengths else []) == list(
        range(len(lengths))
    )
    assert all(0 < sum(lengths[i] for i in rows[r]) <= 40 for r in range(len(rows)))


@given(lengths=LENGTHS, longest_first=st.booleans())
def test_it_is_best_fit(lengths: list[int], longest_first: bool) -> None:
    rows = packed(lengths, longest_first=longest_first)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if longest_first else list(range(len(lengths)))
    rooms = sorted(40 - sum(lengths[i] for i in rows[r]) for r in range(len(rows)))
    assert rooms == best_fit_by_search(lengths, order=order, capacity=40)


def test_long_rows_and_many_documents_are_filled() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64).clip(2, 4096)
    rows = packed(lengths, capacity=4096)
    assert lengths.sum() / (len(rows) * 4096) > 0.999


def test_without_sorting_rows_come_in_the_order_of_the_data() -> None:
    rows = packed([30, 30, 5, 5, 30, 5, 40], longest_first=False)
    assert [rows[r].tolist() for r in range(len(rows))] == [[0, 2, 3], [1, 5], [4], [6]]


def test_reordering_moves_whole_rows() -> None:
    rows = packed([30, 30, 5, 5, 30, 5, 40], longest_first=False).reordered(np.array([3, 0, 2, 1]))
    assert [rows[r].tolist() for r in range(len(rows))] == [[6], [0, 2, 3], [4], [1, 5]]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_one_each(count: int) -> None:
    rows = one_each(np.arange(count))
    assert [rows[r].tolist() for r in range(len(rows))] == [[i] for i in range(count)]
