"""What the operating system says of this process."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("megatrain", "torch", "transformers", "safetensors", "datasets", "numpy")
_DRIVER_TIMEOUT_S = 20


def host_peak_bytes() -> int:
    """Peak resident memory of this process.

    VmHWM, not ru_maxrss: the latter is inherited across exec from whatever the parent was.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def vram_by_driver(pid: int) -> int | None:
    """Bytes of GPU memory that the driver counts for a process; None where it does not tell (some containers)."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return vram_of(done.stdout, pid=pid)


def vram_of(table: str, *, pid: int) -> int | None:
    """Bytes that nvidia-smi's "pid, MiB" lines give a process, over all GPUs."""
    rows = (line.split(",") for line in table.splitlines())
    found = [int(row[1]) for row in rows if len(row) == 2 and row[0].strip() == str(pid) and row[1].strip().isdigit()]
    return sum(found) << 20 if found else None


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, from package metadata (nothing is imported)."""
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            if package == "megatrain":
                found[package] = "source tree"
    return found
