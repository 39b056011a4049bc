"""The distance to the machine's limit, with rates of a data sheet and with measured ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.train.yardstick import Yardstick, yardstick
from plan.test_speed import B7, cut


def stick(*, moment_bytes: int = 4) -> Yardstick:
    found = yardstick(B7, plan=plan(), device_name="NVIDIA H200", moment_bytes=moment_bytes)
    assert found is not None
    return found


def plan(*, on_cpu: bool = False) -> Any:
    return SimpleNamespace(**{**vars(cut(B7, rows=16, parts=1)), "threads": 14, "on_cpu": on_cpu})


def test_there_is_none_where_the_peak_is_a_guess() -> None:
    assert yardstick(B7, plan=plan(), device_name="Frobnitz 9", moment_bytes=4) is None
    assert yardstick(B7, plan=plan(on_cpu=True), device_name="NVIDIA H200", moment_bytes=4) is None


def test_the_share_is_of_the_slowest_resource() -> None:
    mine = stick()
    light = mine.estimate(16_384)
    assert light.light_by == "optimizer"
    assert mine.share(step_s=2 * light.light_s, tokens=16_384) == pytest.approx(0.5)
    assert mine.share(step_s=light.light_s / 2, tokens=16_384) == 1.0


def test_half_the_moments_are_less_to_move() -> None:
    assert stick(moment_bytes=2).estimate(1024).optimizer_s == pytest.approx(
        18 / 26 * stick().estimate(1024).optimizer_s
    )


def test_measured_rates_take_the_place_of_assumed_ones() -> None:
    own = stick().measured(optimizer_s=3.0, link_in_bytes=11e9)
    found = own.estimate(16_384)
    assert found.optimizer_s == pytest.approx(3.0)
    assert found.link_in_s == pytest.approx(5 * stick().estimate(16_384).link_in_s)
    assert own.rates.link_out_bytes == stick().rates.link_out_bytes
    assert own.rates.link_duplex_bytes == pytest.approx(stick().rates.link_duplex_bytes / 5)
    assert stick().measured(optimizer_s=0.0).rates == stick().rates
