"""What the streaming rooms ask of a device: three streams, events, copies, buffers.

compute  runs the layers; everything the model does is enqueued here
fetch    host -> device copies: weights, stored activations; runs beside compute and send
send     device -> host copies: gradients, activations; runs beside compute and fetch

Streams are FIFO. Work on different streams is unordered unless an event recorded on one is waited for on
another, so each `wait` carries the name of the invariant that it keeps (docs/architecture.md, section 4).
`touch` states which shared resources the kernels enqueued next read and write. It costs nothing on a real
device; the timeline device of the tests turns it into a race detector.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor


class StreamName(Enum):
    """The queues of work of a device, and the thread that fills them."""

    COMPUTE = "compute"
    FETCH = "fetch"
    SEND = "send"
    HOST = "host"


class Event(Protocol):
    """A fact that becomes true when the stream that recorded it gets there."""


class Rng(Protocol):
    """The default generator of the device: what dropout draws from."""

    def get(self) -> object: ...
    def set(self, state: object) -> None: ...
    def seed(self, value: int) -> None: ...


class Device(Protocol):
    """A place that computes. Buffers it hands out live as long as the device."""

    @property
    def torch_device(self) -> torch.device: ...
    @property
    def rng(self) -> Rng: ...

    def computing(self) -> AbstractContextManager[None]: ...
    def event(self, fact: str) -> Event: ...
    def record(self, event: Event, *, on: StreamName) -> None: ...
    def wait(self, event: Event, *, on: StreamName, keeps: str) -> None: ...
    def host_wait(self, event: Event, *, keeps: str) -> None: ...
    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None: ...
    def touch(self, what: str, *, on: StreamName, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None: ...
    def upload(self, tensor: Tensor) -> Tensor: ...
    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor: ...
    def host_buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor: ...
    def mark(self, *, on: StreamName) -> Event: ...
    def elapsed_s(self, start: Event, *, end: Event) -> float: ...
    def synchronize(self) -> None: ...
    def release_cache(self) -> None: ...
    def memory_peak_bytes(self) -> int: ...
    def reset_memory_peak(self) -> None: ...
    def memory_given_back(self) -> int: ...


class CpuRng:
    """torch's default CPU generator."""

    def get(self) -> object:
        return torch.get_rng_state()

    def set(self, state: object) -> None:
        assert isinstance(state, Tensor)
        torch.set_rng_state(state)

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)


class CpuEvent:
    """On the CPU everything enqueued has already happened; an event only remembers when."""

    def __init__(self) -> None:
        self.time_s = 0.0


class CpuDevice:
    """The same program without an accelerator: streams are immediate, slots are copies in RAM."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.rng: Rng = CpuRng()

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def event(self, fact: str) -> Event:
        return CpuEvent()

    def record(self, event: Event, *, on: StreamName) -> None:
        pass

    def wait(self, event: Event, *, on: StreamName, keeps: str) -> None:
        pass

    def host_wait(self, event: Event, *, keeps: str) -> None:
        pass

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        target.copy_(source)

    def touch(self, what: str, *, on: StreamName, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None:
        pass

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def host_buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def mark(self, *, on: StreamName) -> Event:
        event = CpuEvent()
        event.time_s = time.perf_counter()
        return event

    def elapsed_s(self, start: Event, *, end: Event) -> float:
        assert isinstance(start, CpuEvent)
        assert isinstance(end, CpuEvent)
        return end.time_s - start.time_s

    def synchronize(self) -> None:
        pass

    def release_cache(self) -> None:
        pass

    def memory_peak_bytes(self) -> int:
        return 0

    def reset_memory_peak(self) -> None:
        pass

    def memory_given_back(self) -> int:
        return 0
