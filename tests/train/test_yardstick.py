"""The distance to the machine's limit, with rates of a data sheet and with measured ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatrain.train.yardstick import Yardstick, yardstick
from plan.test_speed import B7, cut


def planned(*, device: str = "NVIDIA H200", on_cuda: bool = True, state: str = "fp32") -> SimpleNamespace:
    plan = SimpleNamespace(**vars(cut(B7, rows=16, parts=1)), threads=14)
    recipe = SimpleNamespace(optimizer=SimpleNamespace(state=state))
    model = SimpleNamespace(sizes=B7)
    return SimpleNamespace(device_name=device, on_cuda=on_cuda, plan=plan, recipe=recipe, model=model)


def stick(**options: str) -> Yardstick:
    found = yardstick(planned(**options))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_there_is_none_where_the_peak_is_a_guess() -> None:
    assert yardstick(planned(device="Frobnitz 9")) is None  # type: ignore[arg-type]
    assert yardstick(planned(device="CPU, 2 threads", on_cuda=False)) is None  # type: ignore[arg-type]


def test_the_share_is_of_the_slowest_resource() -> None:
    mine = stick()
    light = mine.estimate(16_384)
    assert light.light_by == "optimizer"
    assert mine.share(step_s=2 * light.light_s, tokens=16_384) == pytest.approx(0.5)
    assert mine.share(step_s=light.light_s / 2, tokens=16_384) == 1.0


def test_half_the_moments_are_less_to_move() -> None:
    assert stick(state="bf16").estimate(1024).optimizer_s == pytest.approx(18 / 26 * stick().estimate(1024).optimizer_s)


def test_measured_rates_take_the_place_of_assumed_ones() -> None:
    own = stick().measured(tokens=16_384, optimizer_s=3.0, link_in_bytes=11e9, link_out_bytes=None)
    found = own.estimate(16_384)
    assert found.optimizer_s == pytest.approx(3.0)
    assert found.link_in_s == pytest.approx(5 * stick().estimate(16_384).link_in_s)
    assert own.rates.link_out_bytes == stick().rates.link_out_bytes
    assert own.rates.link_duplex_bytes == pytest.approx(stick().rates.link_duplex_bytes / 5)
    nothing = stick().measured(tokens=16_384, optimizer_s=0.0, link_in_bytes=None, link_out_bytes=None)
    assert nothing.rates == stick().rates
