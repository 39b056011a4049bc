"""What this machine has and how fast it is, in about ten seconds. On a machine without a GPU: its host half."""

from __future__ import annotations

import ctypes
import platform
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatrain.errors import DeviceError
from megatrain.host.arena import Arena
from megatrain.host.pages import footprint
from megatrain.optim.definition import AdamWHyper, Factors
from megatrain.optim.kernel import Job, KernelMissing, load_kernel
from megatrain.optim.threads import optimizer_threads
from megatrain.plan.hardware import HostMemory, Limit, read_host_memory, read_page_lock
from megatrain.stream.device_cuda import cuda_available, open_cuda
from megatrain.stream.device_probe import LinkRates, measure_link
from megatrain.train.examination import UPDATE_BYTES, Examination
from megatrain.train.findings import Facts, findings, read_facts
from megatrain.train.gpus import GpuFacts, read_gpu
from megatrain.units import format_size

GIB = 1 << 30
ELEMENTS = 64 << 20
"""Of the AdamW measurement: 1 GiB of state, far beyond any cache."""
COPY_BYTES = GIB
LINK_BYTES = GIB // 2
LOCK_PIECE = GIB // 4
MOST_LOCKED = 16 * GIB
MEASURE_S = 0.6


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found; `examination` is what planning uses of it."""

    examination: Examination
    facts: Facts
    gpu: GpuFacts | None
    trouble: str | None  # why there is no GPU part
    memory: HostMemory
    page_lock: Limit | None
    seconds: float
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        found = self.examination
        return {
            "status": "done",
            "exit_code": 0,
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "gpu_trouble": self.trouble,
            "link": {
                "in_bytes_per_s": found.link_in_bytes_per_s,
                "out_bytes_per_s": found.link_out_bytes_per_s,
                "duplex_bytes_per_s": found.link_duplex_bytes_per_s,
                "pageable_in_bytes_per_s": found.pageable_in_bytes_per_s,
            },
            "host": asdict(self.facts) | {"copy_bytes_per_s": found.copy_bytes_per_s, "threads": found.threads},
            "kernel": {
                "isa": found.isa,
                "params_per_s": found.update_params_per_s,
                "bytes_per_s": UPDATE_BYTES * found.update_params_per_s,
            },
            "page_lock": {
                "tried_bytes": found.page_lock_bytes,
                "failure": found.page_lock_failure,
                "limit_bytes": None if self.page_lock is None else self.page_lock.bytes,
                "limit_source": None if self.page_lock is None else self.page_lock.source,
            },
            "limits": {
                "host_bytes": self.memory.limit.bytes,
                "host_source": self.memory.limit.source,
                "available_bytes": self.memory.available.bytes,
                "available_source": self.memory.available.source,
            },
            "findings": list(self.findings),
            "seconds": self.seconds,
        }


def examine() -> Diagnosis:
    """Measure. On a machine with little memory free, on smaller blocks."""
    began = time.perf_counter()
    memory = read_host_memory()
    scale = min(1.0, memory.available.bytes / 8 / max(16 * ELEMENTS, 2 * COPY_BYTES))
    threads = optimizer_threads()
    copy = host_copy_rate(int(COPY_BYTES * scale), threads=threads)
    isa, update = update_rate(int(ELEMENTS * scale), threads=threads)
    gpu, trouble = _find_gpu()
    measured = _GpuHalf(trouble=trouble) if gpu is None else _measure_gpu(memory, scale=scale, threads=threads)
    link = measured.link
    examination = Examination(
        host=platform.node(),
        gpu=None if gpu is None else gpu.name,
        threads=threads,
        isa=isa,
        copy_bytes_per_s=copy,
        update_params_per_s=update,
        link_in_bytes_per_s=None if link is None else link.into,
        link_out_bytes_per_s=None if link is None else link.out,
        link_duplex_bytes_per_s=None if link is None else link.duplex,
        pageable_in_bytes_per_s=None if link is None else link.pageable_into,
        page_lock_bytes=measured.locked_bytes,
        page_lock_failure=measured.lock_failure,
    )
    facts, page_lock = read_facts(), read_page_lock()
    return Diagnosis(
        examination=examination,
        facts=facts,
        gpu=gpu,
        trouble=measured.trouble,
        memory=memory,
        page_lock=page_lock,
        seconds=time.perf_counter() - began,
        findings=findings(examination, facts=facts, gpu=gpu, page_lock=page_lock),
    )


# --- the host ----------------------------------------------------------------------------------------------


def host_copy_rate(nbytes: int, *, threads: int) -> float:
    """Bytes per second that `threads` threads read and write when they copy memory to memory."""
    arena = Arena(pinned_bytes=0, pageable_bytes=2 * footprint(nbytes, pinned=False), threads=threads, pin=False)
    source, target = (arena.take(nbytes, pinned=False) for _ in range(2))
    move = ctypes.CDLL(None).memmove
    move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    piece = -(-nbytes // threads)

    def copy(start: int) -> None:
        move(target.data_ptr() + start, source.data_ptr() + start, min(piece, nbytes - start))

    with ThreadPoolExecutor(threads) as pool:
        seconds = best_s(lambda: list(pool.map(copy, range(0, nbytes, piece))))
    return 2 * nbytes / seconds


def update_rate(elements: int, *, threads: int) -> tuple[str, float]:
    """(instruction path, parameters per second) of AdamW with fp32 moments and masters in halves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelMissing)  # it is among the findings
        kernel = load_kernel(threads=threads)
    if kernel is None:
        return "torch", _torch_rate(elements // 8)
    arena = Arena(pinned_bytes=0, pageable_bytes=(2 + 2 + 4 + 4 + 2) * elements + 5 * 256, threads=threads, pin=False)
    hi, lo, first, second, grad = (arena.take(width * elements, pinned=False) for width in (2, 2, 4, 4, 2))
    job = Job(
        weights=hi.view(torch.bfloat16),
        low=lo.view(torch.int16),
        exp_avg=first.view(torch.float32),
        exp_avg_sq=second.view(torch.float32),
        grad=grad.view(torch.bfloat16),
        factors=_factors(),
    )
    seconds = best_s(lambda: kernel.run([job]))
    name = kernel.isa.name.lower()
    kernel.close()
    return name, elements / seconds


def _torch_rate(elements: int) -> float:
    """Without the kernel, of torch's own fused step: what is done instead."""
    weight = torch.zeros(elements, requires_grad=True)
    weight.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return elements / best_s(optimizer.step)


def _factors() -> Factors:
    hyper = AdamWHyper(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    return Factors.of(hyper, step=1, lr=1e-5, clip=1.0, decays=False)


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of as many repeats as fit into MEASURE_S, after one to warm up."""
    work()
    times: list[float] = []
    while not times or sum(times) < MEASURE_S:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


# --- the GPU ----------------------------------------------------------------------------------------------


def _find_gpu() -> tuple[GpuFacts | None, str | None]:
    gpu = read_gpu(0)
    if gpu is None:
        return None, "no NVIDIA driver, or no GPU that this process may see"
    return gpu, None


@dataclass(frozen=True)
class _GpuHalf:
    """What was measured with a GPU. trouble: why nothing could be; lock_failure: why no more could be page-locked."""

    link: LinkRates | None = None
    locked_bytes: int | None = None
    lock_failure: str | None = None
    trouble: str | None = None


def _measure_gpu(memory: HostMemory, *, scale: float, threads: int) -> _GpuHalf:
    if not cuda_available():
        return _GpuHalf(trouble="PyTorch finds no CUDA device: is it a CUDA build for this driver?")
    try:
        device = open_cuda(0)
    except DeviceError as error:
        return _GpuHalf(trouble=error.message)
    size = footprint(int(LINK_BYTES * scale), pinned=True)
    wanted = min(MOST_LOCKED, memory.available.bytes // 4) // LOCK_PIECE * LOCK_PIECE
    pageable = Arena(pinned_bytes=0, pageable_bytes=size, threads=threads, pin=False)
    arena = Arena(pinned_bytes=max(wanted, 2 * size), pageable_bytes=0, threads=threads, pin=True)
    try:
        blocks = arena.take(size, pinned=True), arena.take(size, pinned=True)
        rates = measure_link(device, locked=blocks, pageable=pageable.take(size, pinned=False))
        for _ in range((wanted - 2 * size) // LOCK_PIECE):
            if arena.report.failure is None:
                arena.take(LOCK_PIECE, pinned=True)
        return _GpuHalf(rates, arena.report.locked_bytes, arena.report.failure)
    except torch.OutOfMemoryError:
        return _GpuHalf(trouble=f"other programs leave no room on the GPU for two blocks of {format_size(size)}")
    finally:
        arena.close()
