"""How often something will be due, counted ahead, is how often it is due."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.train.intervals import Interval, times_due
from megatrain.train.state import TrainState
from megatrain.units import Duration


def walked(every: Duration | None, *, after: int, total: int, epochs: Sequence[int]) -> int:
    """Step by step, as the trainer asks; the last state is saved in any case."""
    interval, state, times = Interval(every), TrainState(), 0
    while state.step < total:
        state = state.advanced(steps_in_epoch=epochs[state.epoch])
        times += state.step > after and (state.step == total or interval.due(state))
    return times


@given(
    value=st.integers(1, 9),
    unit=st.sampled_from(["steps", "epochs", None]),
    epochs=st.lists(st.integers(1, 6), min_size=30, max_size=30),
    total=st.integers(1, 30),
    after=st.integers(0, 31),
    most=st.integers(1, 40),
)
def test_counted_ahead(value: int, unit: str | None, epochs: list[int], total: int, after: int, most: int) -> None:
    every = None if unit is None else Duration(value, unit)  # type: ignore[arg-type]
    found = times_due(every, after=after, total=total, steps_in_epoch=lambda epoch: epochs[epoch], most=most)
    assert found == min(most, walked(every, after=after, total=total, epochs=epochs))


@pytest.mark.parametrize(("after", "wanted"), [(0, None), (5, 0)])
def test_what_only_the_clock_knows(after: int, wanted: int | None) -> None:
    every = Duration(1800, "seconds")
    assert times_due(every, after=after, total=5, steps_in_epoch=lambda epoch: 5, most=3) == wanted
