"""Sizes in messages: comparable where they are large, never 0.00 where they are small."""

from __future__ import annotations

import pytest

from megatrain.plan.words import GIB, gib


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (512 << 10, "512.0 KiB"),
        (8 << 20, "8.0 MiB"),
        (GIB // 2, "0.50 GiB"),
        (1007 * GIB, "1007.00 GiB"),
    ],
)
def test_small_sizes_are_not_rounded_to_nothing(size: int, text: str) -> None:
    assert gib(size) == text
