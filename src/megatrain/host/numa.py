"""Pages of the arena in turn over the memory nodes of this process, so that an update has every node's bandwidth.

A page belongs to the node of the thread that touches it first. The optimizer hands pieces of a unit to whichever thread
is free, so no thread comes back to its pages, and first touch would only decide by chance which node's memory a unit
keeps busy: in the worst case that of one. Taken in turn, page by page, every unit lies on all nodes alike, and threads
need not be tied to cores (which a container's CPU mask and quota would fight).
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

NODES = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
MPOL_INTERLEAVE = 3
MBIND = {"x86_64": 237, "aarch64": 235}
"""The system call's number; libc has no function for it."""
LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

log = logging.getLogger(__name__)

Bind = Callable[[int, int, Sequence[int]], None]


def spread(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], *, bind: Bind | None = None) -> tuple[int, ...]:
    """Ask for the pages of an untouched mapping in turn over `memory_nodes`. Returns the nodes; none: left as it is.

    Where there is one node nothing is asked, and where the system refuses (containers often do) all goes on without.
    """
    nodes = memory_nodes(cpus=os.sched_getaffinity(0))
    if len(nodes) < 2:
        return ()
    try:
        (bind or interleave)(memory.ctypes.data, len(memory), nodes)
    except OSError as error:
        log.info("host memory lies where threads first touch it, not in turn over nodes %s: %s", list(nodes), error)
        return ()
    return nodes


def memory_nodes(*, cpus: set[int], sysfs: Path = NODES, status: Path = STATUS) -> tuple[int, ...]:
    """Nodes with memory that this process may use beside CPUs that it may run on.

    Both, because memory of another kind has nodes without CPUs (a GPU's, where it is coherent), and because memory far
    from every thread of this process is slower for all of them.
    """
    if not sysfs.is_dir():
        return ()
    allowed = _listed(_field(status, "Mems_allowed_list"))
    with_memory = _listed(_text(sysfs / "has_memory"))
    nodes = {int(path.name.removeprefix("node")): path for path in sysfs.glob("node[0-9]*")}
    near = {node for node, path in nodes.items() if cpus & _listed(_text(path / "cpulist"))}
    return tuple(sorted(near & allowed & with_memory))


def interleave(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """mbind(2): pages of this range, once they are touched, in turn over `nodes`. Raises OSError."""
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"the number of mbind on {platform.machine()} is not known")
    mask = (ctypes.c_ulong * (max(nodes) // LONG_BITS + 1))()
    for node in nodes:
        mask[node // LONG_BITS] |= 1 << node % LONG_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    bits = LONG_BITS * len(mask) + 1  # the kernel reads one less than it is told
    arguments = ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_long(MPOL_INTERLEAVE), mask
    if libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(bits), ctypes.c_ulong(0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _listed(text: str) -> set[int]:
    """The numbers of "0-2,5"."""
    found: set[int] = set()
    for part in text.split(",") if text else []:
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _field(status: Path, name: str) -> str:
    lines = _text(status).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
