"""A device that computes on the CPU and remembers who touched what: a missing wait is a Race.

Streams and threads are vector clocks. Enqueueing orders a stream after everything its host thread had seen;
a wait merges the clock of the event. Every access to a shared resource is compared with the last conflicting
ones: if the accessor's clock does not contain them, the program only works by luck.

`skip` loses exactly one wait (by number), for mutation testing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from megatrain.stream.device import CpuDevice, Event, StreamName

Clock = dict[str, int]


class Race(AssertionError):
    """Two accesses to one resource, at least one of them a write, without an order between them."""


@dataclass
class TimelineEvent:
    fact: str
    clock: Clock = field(default_factory=dict)
    time_s: float = 0.0


@dataclass(frozen=True)
class Wait:
    number: int
    keeps: str
    actor: str
    vacuous: bool  # the waiter already knew: losing this wait changes nothing


@dataclass(frozen=True)
class Access:
    actor: str
    tick: int
    what: str


class TimelineDevice(CpuDevice):
    def __init__(self, *, skip: int | None = None) -> None:
        super().__init__()
        self.skip = skip
        self.waits: list[Wait] = []
        self.order: list[str] = []  # accesses, in the order they were enqueued
        self._clocks: dict[str, Clock] = {name.value: {} for name in StreamName}
        self._host = "host"  # the thread that is running
        self._writes: dict[str, Access] = {}
        self._reads: dict[str, list[Access]] = {}

    # -- actors -----------------------------------------------------------------------------------------

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Run as another host thread, started (or handed work) by the current one."""
        before = self._host
        self._merge(name, self._clocks[before])
        self._host = name
        try:
            yield
        finally:
            self._host = before

    def _merge(self, actor: str, clock: Clock) -> None:
        mine = self._clocks.setdefault(actor, {})
        for other, tick in clock.items():
            mine[other] = max(mine.get(other, 0), tick)

    def _actor(self, on: StreamName) -> str:
        """The name of who acts; a stream first learns what the thread that enqueues knows."""
        if on is StreamName.HOST:
            return self._host
        self._merge(on.value, self._clocks[self._host])
        return on.value

    # -- the device protocol ----------------------------------------------------------------------------

    def event(self, fact: str) -> Event:
        return TimelineEvent(fact)

    def record(self, event: Event, *, on: StreamName) -> None:
        assert isinstance(event, TimelineEvent)
        event.clock = dict(self._clocks[self._actor(on)])

    def wait(self, event: Event, *, on: StreamName, keeps: str) -> None:
        assert isinstance(event, TimelineEvent)
        actor = self._actor(on)
        mine = self._clocks[actor]
        vacuous = all(mine.get(other, 0) >= tick for other, tick in event.clock.items())
        number = len(self.waits)
        self.waits.append(Wait(number, keeps, actor, vacuous))
        if number != self.skip:
            self._merge(actor, event.clock)

    def host_wait(self, event: Event, *, keeps: str) -> None:
        self.wait(event, on=StreamName.HOST, keeps=keeps)

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        self.touch(f"copy {reads} -> {writes}", on=on, reads=(reads,), writes=(writes,))
        target.copy_(source)

    def touch(self, what: str, *, on: StreamName, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None:
        actor = self._actor(on)
        clock = self._clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1
        access = Access(actor, clock[actor], what)
        self.order.append(what)
        for name in reads:
            self._after(access, self._writes.get(name), name)
            self._reads.setdefault(name, []).append(access)
        for name in writes:
            self._after(access, self._writes.get(name), name)
            for reader in self._reads.pop(name, []):
                self._after(access, reader, name)
            self._writes[name] = access

    def _after(self, access: Access, earlier: Access | None, resource: str) -> None:
        if earlier is not None and self._clocks[access.actor].get(earlier.actor, 0) < earlier.tick:
            raise Race(
                f"{access.what} on {access.actor} touches {resource} without waiting for "
                f"{earlier.what} on {earlier.actor}"
            )

    def mark(self, *, on: StreamName) -> Event:
        return TimelineEvent("mark")

    def elapsed_s(self, start: Event, *, end: Event) -> float:
        return 0.0


class TimelineUpdates:
    """The optimizer as the ring sees it: seeing an update done is a wait like any other."""

    def __init__(self, device: TimelineDevice, *, units: int, behind: Callable[[int], bool]) -> None:
        self._device = device
        self._behind = behind  # units that are reported as not yet updated until somebody waits for them
        self._done = [TimelineEvent(f"unit{u} updated") for u in range(units)]

    def finished(self, unit: int) -> None:
        self._device.record(self._done[unit], on=StreamName.HOST)

    def updated(self, unit: int) -> bool:
        return not self._behind(unit)

    def wait_updated(self, unit: int) -> None:
        self._device.host_wait(self._done[unit], keeps="no fetch before update")
