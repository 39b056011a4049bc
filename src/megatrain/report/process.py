"""What the operating system says of this process."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("megatrain", "torch", "transformers", "safetensors", "datasets", "numpy")


def host_peak_bytes() -> int:
    """Peak resident memory of this process.

    VmHWM, not ru_maxrss: the latter is inherited across exec from whatever the parent was.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


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
