"""A device that also notes when everything ran: spans per stream, for a timeline of what really happened.

Copies are timed by events around them on their stream. A compute span begins where the executor states what
it enqueues next (`touch`) and ends where the next one begins, so a span includes the wait before its successor;
waits are cut out where the compute stream stood still for one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.stream.device import Device, Event, Rng, StreamName


@dataclass(frozen=True)
class Span:
    """One thing that ran. Seconds since the trace began."""

    lane: str  # a stream's name, or "optimizer"
    what: str
    start_s: float
    end_s: float
    nbytes: int = 0


class TracedDevice:
    """Any device, with a memory of when its work ran. Outside `record_spans` it only passes on."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.recording = False
        self.zero_s = 0.0  # where the spans' seconds count from, on time.perf_counter
        self._copies: list[tuple[StreamName, str, Event, Event, int]] = []
        self._compute: list[tuple[str | None, Event]] = []  # None: nothing of ours from here on

    @contextmanager
    def record_spans(self) -> Iterator[None]:
        """Forget everything, start the clock (the device's and the host's meet here), and note what runs."""
        self._copies.clear()
        self._compute.clear()
        self.inner.synchronize()
        self._zero = self.inner.mark(on=StreamName.COMPUTE)
        self.inner.synchronize()
        self.zero_s = time.perf_counter()
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def spans(self) -> list[Span]:
        """Everything noted so far, after waiting for it."""
        end = self.inner.mark(on=StreamName.COMPUTE)
        self.inner.synchronize()

        def at(event: Event) -> float:
            return self.inner.elapsed_s(self._zero, end=event)

        found = [Span(on.value, what, at(a), at(b), nbytes) for on, what, a, b, nbytes in self._copies]
        for (what, start), (_, stop) in zip(self._compute, [*self._compute[1:], (None, end)], strict=True):
            if what is not None:
                found.append(Span("compute", what, at(start), at(stop)))
        return sorted(found, key=lambda span: span.start_s)

    # -- what is noted ------------------------------------------------------------------------------------

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        if not self.recording:
            self.inner.copy(target, source=source, on=on, reads=reads, writes=writes)
            return
        before = self.inner.mark(on=on)
        self.inner.copy(target, source=source, on=on, reads=reads, writes=writes)
        self._copies.append((on, f"{reads} -> {writes}", before, self.inner.mark(on=on), target.nbytes))

    def touch(self, what: str, *, on: StreamName, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None:
        if self.recording and on is StreamName.COMPUTE:
            self._compute.append((what, self.inner.mark(on=on)))
        self.inner.touch(what, on=on, reads=reads, writes=writes)

    def wait(self, event: Event, *, on: StreamName, keeps: str) -> None:
        if self.recording and on is StreamName.COMPUTE:
            self._compute.append((None, self.inner.mark(on=on)))
        self.inner.wait(event, on=on, keeps=keeps)

    # -- what is passed on --------------------------------------------------------------------------------

    @property
    def torch_device(self) -> torch.device:
        return self.inner.torch_device

    @property
    def rng(self) -> Rng:
        return self.inner.rng

    def computing(self) -> AbstractContextManager[None]:
        return self.inner.computing()

    def event(self, fact: str) -> Event:
        return self.inner.event(fact)

    def record(self, event: Event, *, on: StreamName) -> None:
        self.inner.record(event, on=on)

    def host_wait(self, event: Event, *, keeps: str) -> None:
        self.inner.host_wait(event, keeps=keeps)

    def upload(self, tensor: Tensor) -> Tensor:
        return self.inner.upload(tensor)

    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        return self.inner.buffer(numel, dtype=dtype)

    def host_buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        return self.inner.host_buffer(numel, dtype=dtype)

    def mark(self, *, on: StreamName) -> Event:
        return self.inner.mark(on=on)

    def elapsed_s(self, start: Event, *, end: Event) -> float:
        return self.inner.elapsed_s(start, end=end)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def release_cache(self) -> None:
        self.inner.release_cache()

    def memory_peak_bytes(self) -> int:
        return self.inner.memory_peak_bytes()

    def reset_memory_peak(self) -> None:
        self.inner.reset_memory_peak()

    def memory_given_back(self) -> int:
        return self.inner.memory_given_back()
