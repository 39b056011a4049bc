"""The C++ AdamW kernel, called through ctypes: no Python or PyTorch ABI, no interpreter lock while it runs.

Its arithmetic is `definition`, bit for bit, on every instruction path and for any number of threads.
"""

from __future__ import annotations

import ctypes
import enum
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from megatrain.optim.definition import Factors
from megatrain.optim.rounding import Draws

LIBRARY = Path(__file__).with_name("libmegatrain_adamw.so")
ABI = 2
"""Must equal `kAbi` of adamw.h: the layout of `Run` and the functions' arguments."""


class Isa(enum.IntEnum):
    """Instruction paths. Values are those of adamw.h."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2


class KernelMissing(RuntimeWarning):
    """The kernel was not built: updates run in plain torch, with the same bits, but slower."""


@dataclass(frozen=True)
class Job:
    """A contiguous run of elements that share every factor. Tensors are on the CPU, [n]; all but `grad` are updated.

    With `low`, weights are bf16 high halves and the gradient is bf16; without, both are fp32.
    With `draws`, both moments are bf16 and rounded by them; without, both are fp32.
    """

    weights: Tensor
    low: Tensor | None  # int16
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    factors: Factors
    draws: Draws | None = None

    def check(self) -> None:
        """Raises ValueError on a tensor that the kernel would misread."""
        wide = torch.float32 if self.low is None else torch.bfloat16
        moment = torch.float32 if self.draws is None else torch.bfloat16
        expected = [(self.weights, wide), (self.grad, wide), (self.exp_avg, moment), (self.exp_avg_sq, moment)]
        expected += [] if self.low is None else [(self.low, torch.int16)]
        for tensor, dtype in expected:
            if tensor.dtype is not dtype or tensor.numel() != self.weights.numel():
                raise ValueError(f"expected {dtype} [{self.weights.numel()}], got {tensor.dtype} {list(tensor.shape)}")
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"expected a contiguous CPU tensor, got strides {tensor.stride()} on {tensor.device}")


class Run(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("bf16_moments", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        *((f.name, ctypes.c_float) for f in fields(Factors)),
    )


def pack(job: Job, *, into: ctypes.Structure) -> None:
    """Write a job as the C struct; its tensors must outlive the use of it."""
    into.weights, into.grad = job.weights.data_ptr(), job.grad.data_ptr()
    into.low = None if job.low is None else job.low.data_ptr()
    into.exp_avg, into.exp_avg_sq, into.n = job.exp_avg.data_ptr(), job.exp_avg_sq.data_ptr(), job.weights.numel()
    if job.draws is not None:
        into.bf16_moments, into.first = 1, job.draws.first & 0xFFFFFFFF
        into.key0, into.key1 = job.draws.key0, job.draws.key1
    for field, value in zip(fields(Factors), astuple(job.factors), strict=True):
        setattr(into, field.name, value)


class Kernel:
    """A pool of threads that runs AdamW. Owns the threads; one caller at a time."""

    def __init__(self, library: ctypes.CDLL, *, threads: int, isa: Isa | None = None) -> None:
        """isa: force a path (ValueError if this CPU lacks it); default: the best one."""
        self._pool: int | None = None
        available = _isas(library)
        self.isa = available[-1] if isa is None else isa
        if self.isa not in available:
            raise ValueError(f"this CPU has no {self.isa.name}")
        self._library = library
        self._pool = library.megatrain_pool_create(threads)
        if self._pool is None:
            raise MemoryError("no memory for the optimizer's threads")
        self.threads: int = library.megatrain_pool_threads(self._pool)  # fewer than asked for under a system limit

    def run(self, jobs: Sequence[Job]) -> None:
        """Update everything in `jobs`, spread over all threads; returns when it is done."""
        if self._pool is None:
            raise RuntimeError("the kernel is closed")
        runs = (Run * len(jobs))()
        for run, job in zip(runs, jobs, strict=True):
            job.check()
            pack(job, into=run)
        self._library.megatrain_adamw(self._pool, self.isa, runs, len(jobs))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._library.megatrain_pool_destroy(self._pool)
            self._pool = None

    def __del__(self) -> None:
        self.close()


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """The built library. Raises OSError if it is missing or does not load, or is of another version."""
    library = ctypes.CDLL(str(path))
    library.megatrain_abi.restype = ctypes.c_int
    if library.megatrain_abi() != ABI:
        raise OSError(f"{path} is of another version; rebuild it: python -m megatrain.optim.kernel.build")
    library.megatrain_isas.restype = ctypes.c_uint
    library.megatrain_pool_create.restype = ctypes.c_void_p
    library.megatrain_pool_create.argtypes = (ctypes.c_int,)
    library.megatrain_pool_threads.restype = ctypes.c_int
    library.megatrain_pool_threads.argtypes = (ctypes.c_void_p,)
    library.megatrain_pool_destroy.restype = None
    library.megatrain_pool_destroy.argtypes = (ctypes.c_void_p,)
    library.megatrain_adamw.restype = None
    library.megatrain_adamw.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Run), ctypes.c_int64)
    return library


def load_kernel(*, threads: int) -> Kernel | None:
    """The kernel with its best path, or None and a KernelMissing warning: plain torch then does the same work."""
    try:
        library = load_library()
    except OSError as error:
        warnings.warn(f"AdamW runs in plain torch, which is slower: {error}", KernelMissing, stacklevel=2)
        return None
    return Kernel(library, threads=threads)


def supported_isas() -> tuple[Isa, ...]:
    """Paths that the built library and this CPU have, slowest first. Raises OSError without a library."""
    return _isas(load_library())


def _isas(library: ctypes.CDLL) -> tuple[Isa, ...]:
    mask = library.megatrain_isas()
    return tuple(isa for isa in Isa if mask >> isa & 1)
