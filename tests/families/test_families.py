"""Loss and every gradient of every family, streamed, against plain Hugging Face in the same test."""

from __future__ import annotations

import pytest
from cases import DROPOUT, ROUTER_LOSS, Case, all_cases, run_case
from variants import DEFAULT, EAGER_ONLY, VARIANTS

CASES = all_cases()


def test_the_number_of_cases() -> None:
    """Nobody drops a case unseen: 90 variants of 85 model types, and the modes each of them has."""
    assert len(VARIANTS) == 90
    assert len({name.split("/")[0] for name in VARIANTS}) == 85
    assert len(EAGER_ONLY) == 9
    assert len(ROUTER_LOSS) == 18
    assert len(DROPOUT) == 14
    assert len(CASES) == 90 * 11 + 81 * 2 + 18 * 3 + (3 * 14 - 1)
    assert set(DEFAULT) <= set(VARIANTS)


@pytest.mark.parametrize("case", [c for c in CASES if c.variant in DEFAULT], ids=str)
def test_family(case: Case) -> None:
    assert run_case(case) == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.variant not in DEFAULT], ids=str)
def test_every_other_family(case: Case) -> None:
    assert run_case(case) == {}
