"""The worker's promises: order, waiting for one unit only, errors that come home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from optim_store import fill_gradients

from megatrain.host.store import HostStore, HostUnit
from megatrain.optim.adamw import AdamW
from megatrain.optim.worker import OptimizerFailed, OptimizerWorker, UnitGradient

StoreOf = Callable[..., HostStore]
TIMEOUT_S = 20.0
"""For waits that would last for ever if the worker were wrong."""


def optimizer_of(store: HostStore) -> AdamW:
    return AdamW(
        store, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, decay_all=False, never_decay=frozenset(), kernel=None
    )


def at_once() -> None:
    """The wait of a gradient that is already home."""


def gradients(count: int, *, wait: Callable[[], None] = at_once) -> list[UnitGradient]:
    return [UnitGradient(unit, wait, None) for unit in range(count)]


@pytest.fixture
def store(store_of: StoreOf) -> HostStore:
    store = store_of(torch.bfloat16)
    fill_gradients(store, seed=0)
    return store


@pytest.fixture
def worker_of(store: HostStore) -> Iterator[Callable[..., OptimizerWorker]]:
    made: list[OptimizerWorker] = []

    def make(**options: object) -> OptimizerWorker:
        made.append(OptimizerWorker(optimizer_of(store), store=store, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.mark.parametrize("synchronous", [True, False])
def test_units_are_updated_in_the_order_submitted(
    store: HostStore, worker_of: Callable[..., OptimizerWorker], *, synchronous: bool
) -> None:
    seen: list[tuple[str, int, int]] = []
    worker = worker_of(
        synchronous=synchronous,
        before_unit=lambda unit: seen.append(("before", unit, store.units[unit].version)),
        after_unit=lambda unit: seen.append(("after", unit, store.units[unit].version)),
    )
    for step in (1, 2):
        worker.submit(step, gradients(4), lr=1e-3, clip=1.0)
    worker.drain()
    expected = []
    for version in (0, 1):
        for unit in range(4):
            expected += [("before", unit, version), ("after", unit, version + 1)]
    assert seen == expected
    assert worker.last_update_s > 0


def test_a_unit_is_ready_before_the_next_ones_gradient_is_home(
    store: HostStore, worker_of: Callable[..., OptimizerWorker]
) -> None:
    """The forward chases the update: waiting for layer 0 does not wait for layer 1."""
    home = threading.Event()

    def arrive() -> None:
        assert home.wait(TIMEOUT_S)

    worker = worker_of()
    first, second, *_ = gradients(4)
    worker.submit(1, [first, UnitGradient(second.unit, arrive, None)], lr=1e-3, clip=1.0)
    worker.wait_updated(0)
    assert store.units[0].version == 1
    assert worker.updated(0)
    assert not worker.updated(1)
    assert worker.updated(2)  # nothing was submitted for it
    home.set()
    worker.wait_updated(1)
    assert store.units[1].version == 1


def test_waiting_is_for_every_update_submitted(store: HostStore, worker_of: Callable[..., OptimizerWorker]) -> None:
    worker = worker_of()
    for step in range(1, 6):
        worker.submit(step, gradients(4), lr=1e-3, clip=1.0)
    worker.wait_updated(3)
    assert store.units[3].version == 5


def test_the_thread_gives_the_bits_of_the_synchronous_worker(
    store: HostStore, store_of: StoreOf, worker_of: Callable[..., OptimizerWorker]
) -> None:
    other = store_of(torch.bfloat16)
    fill_gradients(other, seed=0)
    serial = OptimizerWorker(optimizer_of(other), store=other, synchronous=True)
    threaded = worker_of()
    for worker in (serial, threaded):
        for step in (1, 2, 3):
            worker.submit(step, gradients(4), lr=1e-3, clip=0.5)
        worker.drain()
    for left, right in zip(store.units, other.units, strict=True):
        assert torch.equal(left.hi, right.hi)
        assert torch.equal(left.lo, right.lo)


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["wait", "before_unit", "after_unit", "update"])
def test_an_error_comes_home_to_whoever_asks(
    store: HostStore, worker_of: Callable[..., OptimizerWorker], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Broken("the link is down")

    def on_unit_two(unit: int) -> None:
        if unit == 2:
            fail()

    worker = worker_of(**({where: on_unit_two} if where.endswith("unit") else {}))
    if where == "update":
        update = AdamW.update

        def failing(self: AdamW, host: HostUnit, **options: object) -> None:
            on_unit_two(host.unit.index)
            update(self, host, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(AdamW, "update", failing)
    given = gradients(4)
    if where == "wait":
        given[2] = UnitGradient(2, fail, None)
    worker.submit(7, given, lr=1e-3, clip=1.0)
    asks: list[Callable[[], object]] = [
        lambda: worker.wait_updated(3),
        lambda: worker.updated(0),
        worker.drain,
        lambda: worker.submit(8, gradients(4), lr=1e-3, clip=1.0),
    ]
    for ask in asks:
        with pytest.raises(OptimizerFailed, match="at step 7 on the layer 1: the link is down") as caught:
            ask()
        assert isinstance(caught.value.__cause__, Broken)
    worker.close()
    assert [host.version for host in store.units][:2] == [1, 1]
    assert store.units[3].version == 0


def test_a_waiter_is_woken_by_the_failure(worker_of: Callable[..., OptimizerWorker]) -> None:
    waiting, outcome = threading.Event(), []

    def fail_when_waited_for() -> None:
        assert waiting.wait(TIMEOUT_S)
        raise Broken("late")

    worker = worker_of()
    worker.submit(1, gradients(4, wait=fail_when_waited_for), lr=1e-3, clip=1.0)

    def wait() -> None:
        waiting.set()
        try:
            worker.wait_updated(3)
        except OptimizerFailed as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(TIMEOUT_S)
    assert len(outcome) == 1


def test_synchronous_errors_are_raised_by_submit(worker_of: Callable[..., OptimizerWorker]) -> None:
    def fail() -> None:
        raise Broken("now")

    worker = worker_of(synchronous=True)
    with pytest.raises(OptimizerFailed, match="at step 1 on the stem: now"):
        worker.submit(1, gradients(4, wait=fail), lr=1e-3, clip=1.0)


def test_a_resident_unit_that_cannot_be_updated_stops_the_step_and_nobody_waits(
    store: HostStore, worker_of: Callable[..., OptimizerWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    update, first = AdamW.update, store.units[0]

    def failing(self: AdamW, host: HostUnit, **options: object) -> None:
        if host is first:
            raise Broken("the launch failed")
        update(self, host, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(AdamW, "update", failing)
    worker = worker_of()
    given = [UnitGradient(0, at_once, None, resident=first), *gradients(4)[1:]]
    with pytest.raises(OptimizerFailed, match="at step 3 on the stem: the launch failed"):
        worker.submit(3, given, lr=1e-3, clip=1.0)
    heard: list[OptimizerFailed] = []

    def drain() -> None:
        try:
            worker.drain()
        except OptimizerFailed as error:
            heard.append(error)

    waiter = threading.Thread(target=drain, daemon=True)
    waiter.start()
    waiter.join(TIMEOUT_S)
    assert len(heard) == 1
    assert [host.version for host in store.units] == [0, 0, 0, 0]


def test_close_finishes_what_was_submitted(store: HostStore, worker_of: Callable[..., OptimizerWorker]) -> None:
    worker = worker_of()
    for step in (1, 2):
        worker.submit(step, gradients(4), lr=1e-3, clip=1.0)
    worker.close()
    worker.close()
    assert [host.version for host in store.units] == [2, 2, 2, 2]
    assert all(thread.name != "optimizer" for thread in threading.enumerate())
