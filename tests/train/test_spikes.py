"""The threshold above which a loss is called a spike."""

from __future__ import annotations

import math
import random

from megatrain.train.spikes import LossWatch


def spikes(losses: list[float]) -> list[int]:
    watch = LossWatch()
    return [i for i, loss in enumerate(losses) if watch.exceeded(loss) is not None]


def noisy(count: int, *, level: float, spread: float) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(level, spread) for _ in range(count)]


def test_noise_and_a_falling_loss_are_no_spikes() -> None:
    assert spikes(noisy(5000, level=2.0, spread=0.3)) == []
    assert spikes([10 / (1 + i / 50) for i in range(1000)]) == []
    assert spikes([2.0] * 100 + [2.5]) == []


def test_one_loss_far_out_is_a_spike_and_does_not_hide_the_next() -> None:
    losses = noisy(200, level=2.0, spread=0.1)
    losses[100], losses[101], losses[150] = 6.0, 5.0, 7.0
    assert spikes(losses) == [100, 101, 150]


def test_a_new_level_is_soon_the_usual_one() -> None:
    found = spikes([2.0] * 100 + [5.0] * 200)
    assert found[0] == 100
    assert 20 < len(found) < 64


def test_nothing_is_said_of_the_first_losses_and_of_what_is_not_finite() -> None:
    assert spikes([1.0] * 10 + [1e9]) == []
    assert spikes([1.0] * 20 + [math.nan, 1.0]) == []
