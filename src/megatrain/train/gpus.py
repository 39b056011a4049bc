"""GPUs as the driver's management library (NVML) counts them: no context is made and no torch is needed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_TEXT = 96


@dataclass(frozen=True)
class GpuFacts:
    """One device. Link generation and width: of the slot now, and the most that card and slot can do."""

    index: int
    name: str
    driver: str
    total_bytes: int
    free_bytes: int
    link_generation: int
    link_generation_max: int
    link_width: int
    link_width_max: int
    capability: tuple[int, int] | None = None  # CUDA's compute capability; None where the driver does not say


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def load_nvml() -> Any | None:
    """The library, None where there is no driver."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def read_gpu(index: int, *, nvml: Callable[[], Any | None] = load_nvml) -> GpuFacts | None:
    """Device `index` as CUDA counts them (CUDA_VISIBLE_DEVICES); None where there is none or the driver fails."""
    library = nvml()
    if library is None or library.nvmlInit_v2() != 0:
        return None
    try:
        handle = ctypes.c_void_p()
        if not _find(library, index, handle):
            return None
        memory = _Memory()
        if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        name, driver = ctypes.create_string_buffer(_TEXT), ctypes.create_string_buffer(_TEXT)
        library.nvmlDeviceGetName(handle, name, _TEXT)
        library.nvmlSystemGetDriverVersion(driver, _TEXT)
        return GpuFacts(
            index=index,
            name=name.value.decode(errors="replace"),
            driver=driver.value.decode(errors="replace"),
            total_bytes=memory.total,
            free_bytes=memory.free,
            link_generation=_number(library.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            link_generation_max=_number(library.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            link_width=_number(library.nvmlDeviceGetCurrPcieLinkWidth, handle),
            link_width_max=_number(library.nvmlDeviceGetMaxPcieLinkWidth, handle),
            capability=_capability(library, handle),
        )
    finally:
        library.nvmlShutdown()


def _find(library: Any, index: int, handle: ctypes.c_void_p) -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return bool(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if index >= len(names) or names[index] == "-1":
        return False
    chosen = names[index]
    if chosen.isdigit():
        return bool(library.nvmlDeviceGetHandleByIndex_v2(int(chosen), ctypes.byref(handle)) == 0)
    return bool(library.nvmlDeviceGetHandleByUUID(chosen.encode(), ctypes.byref(handle)) == 0)


def _capability(library: Any, handle: ctypes.c_void_p) -> tuple[int, int] | None:
    major, minor = ctypes.c_int(), ctypes.c_int()
    found = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    return (major.value, minor.value) if found else None


def _number(function: Any, handle: ctypes.c_void_p) -> int:
    """0 where the driver does not say."""
    value = ctypes.c_uint()
    return value.value if function(handle, ctypes.byref(value)) == 0 else 0
