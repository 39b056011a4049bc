"""Pieces of state on their way to their update and back: what comes home is updated, and every wait is needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from timeline import Race, TimelineDevice
from torch import Tensor

from megatrain.host.visit import Visit
from megatrain.stream.device import CpuDevice, Event, StreamName
from megatrain.stream.visitors import Visitors, state_name

COUNT, PLACES = 7, 3


def halve(there: Sequence[Tensor]) -> None:
    weights, moment, grad = there
    weights.sub_(grad)
    moment.add_(grad * 0.5)


def state() -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (torch.full((1000 + i,), 1.0), torch.zeros(1000 + i), torch.full((1000 + i,), float(i))) for i in range(COUNT)
    ]


def run(device: CpuDevice) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Two rounds; after each the host reads what came home, and writes new gradients."""
    visitors, pieces = Visitors(device, places=PLACES), state()
    for _ in range(2):
        visitors.start([Visit((w, m), (g,), halve) for w, m, g in pieces])
        assert visitors.finish() >= 0.0
        for w, m, g in pieces:
            device.touch("read", on=StreamName.HOST, reads=(state_name(w), state_name(m)), writes=(state_name(g),))
    return pieces


def test_everything_comes_home_updated() -> None:
    for i, (weights, moment, grad) in enumerate(run(CpuDevice())):
        assert torch.equal(weights, torch.full_like(weights, 1.0 - 2 * i))
        assert torch.equal(moment, torch.full_like(moment, float(i)))
        assert torch.equal(grad, torch.full_like(grad, float(i)))


def test_a_visit_is_timed_from_its_way_in_to_its_way_out_whenever_somebody_asks() -> None:
    marks: list[StreamName] = []

    class Watched(CpuDevice):
        def mark(self, *, on: StreamName) -> Event:
            marks.append(on)
            return super().mark(on=on)

    visitors = Visitors(Watched(), places=PLACES)
    visitors.start([Visit((w, m), (g,), halve) for w, m, g in state()])
    assert marks == [StreamName.VISIT_IN, StreamName.VISIT_OUT]
    visitors.finish()
    assert len(marks) == 2


def test_without_visits_there_is_nothing_to_wait_for() -> None:
    visitors = Visitors(CpuDevice(), places=PLACES)
    visitors.start([])
    assert visitors.finish() == 0.0


def test_every_wait_matters() -> None:
    device = TimelineDevice()
    run(device)
    killed = set()
    for wait in device.waits:
        if wait.vacuous:
            continue
        with pytest.raises(Race):
            run(TimelineDevice(skip=wait.number))
        killed.add(wait.keeps)
    assert killed == {
        "no overwrite before it is home",
        "no way home before the update",
        "no use before it is home",
    }
