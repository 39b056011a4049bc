"""The CUDA device: real streams and events, a hard ceiling on memory, page-locked uploads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.errors import DeviceError, DoesNotFit
from megatrain.stream.device import Device, Event, Rng, StreamName
from megatrain.units import format_size


class CudaRng:
    """The default generator of one CUDA device; its state lives on the host, so reading it does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get(self) -> object:
        return torch.cuda.get_rng_state(self._device)

    def set(self, state: object) -> None:
        assert isinstance(state, Tensor)
        torch.cuda.set_rng_state(state, self._device)

    def seed(self, value: int) -> None:
        # Not torch.manual_seed: modules may draw on the CPU generator for other purposes (shuffling).
        with torch.cuda.device(self._device):
            torch.cuda.manual_seed(value)


def cuda_available() -> bool:
    """Whether there is a CUDA device at all."""
    return torch.cuda.is_available()


def device_name(device: torch.device) -> str:
    """As the driver calls it: "NVIDIA H200"."""
    return torch.cuda.get_device_name(device)


def device_capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability: (9, 0) is a Hopper."""
    return torch.cuda.get_device_capability(device)


def open_cuda(index: int) -> torch.device:
    """The CUDA device `index` with its context created. Raises DeviceError if there is none that works."""
    # Blocks of changing sizes (micro-batches of unequal length) fragment fixed segments; read at the first allocation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if not torch.cuda.is_available():
        raise DeviceError(
            "no usable CUDA device",
            where="memory.device",
            hint="check `nvidia-smi` and that this PyTorch is a CUDA build, or set memory.device: cpu",
        )
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"there is no cuda:{index}; found {torch.cuda.device_count()} CUDA devices", where="memory.device"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        raise DeviceError(f"cuda:{index} cannot be used: {error}", where="memory.device") from error
    return device


def vram_free_bytes(device: torch.device) -> tuple[int, int]:
    """(bytes this process could still take, bytes taken on the device by contexts and other processes)."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return free + reserved, total - free - reserved


def others_bytes(device: Device) -> int | None:
    """What other processes hold on the device now; None where that is not a CUDA device."""
    if not isinstance(device, CudaDevice):
        return None
    _, taken = vram_free_bytes(device.torch_device)
    return max(0, taken - device.context_bytes)


class CudaDevice:
    """One CUDA device. The compute stream is PyTorch's current stream; the two copy streams are its own."""

    def __init__(
        self, device: torch.device, *, ceiling_bytes: int | None, free_before_bytes: int | None = None
    ) -> None:
        """`ceiling_bytes`: what this process may take of the device's memory, its context included.
        free_before_bytes: what was free before this process opened the device; without it everything that is taken
        now counts as its context.

        Raises DoesNotFit if the context alone is larger.
        """
        self.torch_device = device
        self.rng: Rng = CudaRng(device)
        self._streams = {
            StreamName.COMPUTE: torch.cuda.current_stream(device),
            StreamName.FETCH: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            StreamName.SEND: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }
        hopper = device_capability(device) >= (9, 0)
        self._cudnn_attention = hopper and not torch.are_deterministic_algorithms_enabled()
        free, taken = vram_free_bytes(device)
        self.context_bytes = taken if free_before_bytes is None else min(taken, max(0, free_before_bytes - free))
        if ceiling_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            rest = ceiling_bytes - self.context_bytes
            if rest <= 0:
                raise DoesNotFit(
                    f"memory.vram {format_size(ceiling_bytes)} is less than the CUDA context itself "
                    f"({format_size(self.context_bytes)})",
                    where="memory.vram",
                    hint="raise memory.vram",
                )
            torch.cuda.set_per_process_memory_fraction(min(1.0, rest / total), device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the work of a step: which attention kernels are tried, best first.

        cuDNN's are up to twice as fast as the others on Hopper, but its backward sums in no fixed order.
        """
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        if self._cudnn_attention:
            order.insert(0, SDPBackend.CUDNN_ATTENTION)
        with sdpa_kernel(order, set_priority=True):
            yield

    def event(self, fact: str) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: Event, *, on: StreamName) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.record(self._streams[on])

    def wait(self, event: Event, *, on: StreamName, keeps: str) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._streams[on].wait_event(event)

    def host_wait(self, event: Event, *, keeps: str) -> None:
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()

    def copy(self, target: Tensor, *, source: Tensor, on: StreamName, reads: str, writes: str) -> None:
        with torch.cuda.stream(self._streams[on]):
            target.copy_(source, non_blocking=True)

    def touch(self, what: str, *, on: StreamName, reads: Sequence[str] = (), writes: Sequence[str] = ()) -> None:
        pass

    def upload(self, tensor: Tensor) -> Tensor:
        # pin_memory takes from PyTorch's caching host allocator: page-locked once, reused every step
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(numel, dtype=dtype, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit(
                f"a buffer of {format_size(numel * dtype.itemsize)} does not fit on {self.torch_device}",
                hint="raise memory.vram, or lower memory.slots or memory.micro_batch",
            ) from error

    def host_buffer(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype).pin_memory()

    def mark(self, *, on: StreamName) -> Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[on])
        return event

    def elapsed_s(self, start: Event, *, end: Event) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def release_cache(self) -> None:
        """Give unused memory of the pool back to the driver."""
        gc.collect()
        torch.cuda.empty_cache()

    def memory_peak_bytes(self) -> int:
        """Peak of what this process held on the device: PyTorch's pool and the CUDA context."""
        return int(torch.cuda.max_memory_reserved(self.torch_device)) + self.context_bytes

    def reset_memory_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def memory_given_back(self) -> int:
        """How often PyTorch's pool was full and gave all unused memory back, to take it anew in another place.

        It waits for the device each time. A steady step never does that where the ceiling leaves room enough.
        """
        # asked around every step, so without flattening the hundred others
        return int(torch.cuda.memory_stats_as_nested_dict(self.torch_device).get("num_alloc_retries", 0))
