"""Which exceptions are the machine's and not a bug of ours, and how an error looks in run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatrain.errors import DISK_FAULTS, DiskError, DoesNotFit, MegatrainError
from megatrain.optim.worker import OptimizerFailed
from megatrain.train.gate import SaverFailed

_NO_THREAD = "can't start new thread"  # nor has Python
_DEVICE_FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # PyTorch has no class for it


def device_is_full(error: Exception) -> bool:
    """Whether the device had no memory: PyTorch's own error, or what libraries and the driver say without its pool."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_FULL)


def machine_error(error: Exception, *, folder: Path | None = None) -> MegatrainError | None:
    """What the machine lacks, if that is what the error says, or what the optimizer's or the saver's thread died of.

    In the run's own `folder` every trouble with a file is somebody else's: what lies there was moved or replaced.
    """
    if isinstance(error, MegatrainError):
        return error
    if isinstance(error, OptimizerFailed | SaverFailed) and isinstance(error.__cause__, Exception):
        return machine_error(error.__cause__, folder=folder)
    if device_is_full(error):
        return DoesNotFit(
            f"the device ran out of memory: {str(error).splitlines()[0]}",
            hint="lower memory.micro_batch, or set memory.vram below what is really free",
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)):
        return DoesNotFit("host memory is exhausted", hint="lower memory.micro_batch, or set memory.host")
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return DoesNotFit(
            "this process may start no more threads",
            hint="raise its limits (ulimit -u, ulimit -v, the container's pids), or lower memory.threads",
        )
    if isinstance(error, OSError) and (error.errno in DISK_FAULTS or _lies_in(folder, error.filename)):
        return DiskError(error.strerror or str(error), where=str(error.filename or "output.dir"))
    return None


def _lies_in(folder: Path | None, name: object) -> bool:
    return folder is not None and isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())


def error_object(error: Exception) -> dict[str, Any]:
    """The `error` of run.json."""
    if isinstance(error, MegatrainError):
        return {"kind": error.kind, "message": error.message, "hint": error.hint, "where": error.where}
    return {"kind": "internal", "message": f"{type(error).__name__}: {error}", "hint": None, "where": None}
