"""One block of RAM for everything that lives on the host, touched once and page-locked where it streams.

torch's own ``pin_memory`` rounds every block up to a power of two and touches pages on one thread; a plain
anonymous mapping with huge pages, populated by several threads and then registered with CUDA, costs exactly
its size and a tenth of the time. On a machine with several memory nodes its pages lie on all of them in turn (`numa`).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import DoesNotFit
from megatrain.host import numa
from megatrain.host.pages import BORDER
from megatrain.host.pages import footprint as footprint

HUGE_PAGE = 2 << 20
TOUCH_PIECE = 64 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in for writing without writing to them

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArenaReport:
    """What there is, and what of it is page-locked."""

    total_bytes: int
    locked_bytes: int
    failure: str | None  # why the rest is pageable


class Arena:
    """Hands out blocks of one mapping, in order, never taken back before the end.

    A page-locked block is one registration, because a copy that crosses from one registration into another is
    refused by CUDA (invalid argument): copy within a block, never across two. The first registration that fails
    ends page-locking: later blocks are pageable, `report` says why.
    """

    def __init__(self, *, pinned_bytes: int, pageable_bytes: int, threads: int, pin: bool) -> None:
        """Map and populate. The two sizes are sums of `footprint`. Raises DoesNotFit when RAM cannot be had."""
        self._size = footprint(pinned_bytes, pinned=True) + footprint(pageable_bytes, pinned=False) + BORDER
        self._memory = _map(self._size)
        numa.spread(self._memory)
        _populate(self._memory, threads=threads)
        self._next = 0
        self._settled = self._settled_wanted = 0
        self._pin = pin
        self._wanted_locked = 0
        self._locked: dict[int, int] = {}  # address -> bytes
        self._failure: str | None = None

    def take(self, nbytes: int, *, pinned: bool) -> Tensor:
        """The next block: uint8 [nbytes], zero, 256-byte aligned (a page, if `pinned`). Raises RuntimeError at the end.

        Pinned and pageable blocks share the space; the arena owns the memory, tensors keep it mapped.
        """
        start = footprint(self._next, pinned=pinned)
        end = start + footprint(nbytes, pinned=pinned)
        if end > self._size:
            raise RuntimeError(f"arena of {self._size} bytes has no room for {nbytes} more after {self._next}")
        self._next = end
        block = torch.from_numpy(self._memory[start : start + nbytes])
        if pinned and self._pin and nbytes:
            self._wanted_locked += end - start
            self._lock(block.data_ptr(), nbytes=end - start)
        return block

    def settle(self) -> None:
        """What was taken so far stays; `rewind` comes back to here."""
        self._settled, self._settled_wanted = self._next, self._wanted_locked

    def rewind(self) -> None:
        """Take back the blocks handed out since `settle`, whose memory keeps what it held. No copy may be in flight."""
        first = self._memory.ctypes.data + footprint(self._settled, pinned=True)
        for address in [a for a in self._locked if a >= first]:
            _cudart().cudaHostUnregister(address)
            del self._locked[address]
        self._next, self._wanted_locked = self._settled, self._settled_wanted

    @property
    def report(self) -> ArenaReport:
        return ArenaReport(self._size, sum(self._locked.values()), self._failure)

    @property
    def pinned_fraction(self) -> float:
        """Share of what should be page-locked that is; 1.0 when nothing should."""
        return min(1.0, sum(self._locked.values()) / self._wanted_locked) if self._wanted_locked else 1.0

    def close(self) -> None:
        """Unlock the pages. No copy may be in flight; the memory goes with the last tensor that views it."""
        for address in self._locked:
            _cudart().cudaHostUnregister(address)
        self._locked.clear()

    def _lock(self, address: int, *, nbytes: int) -> None:
        if self._failure is not None:
            return
        reason = self._register(address, nbytes=nbytes)
        if reason is not None:
            self._failure = f"page-locking failed after {_gib(sum(self._locked.values()))}: {reason}"
            log.warning("%s; the rest of host memory is pageable and copies from it are slower", self._failure)

    def _register(self, address: int, *, nbytes: int) -> str | None:
        """Why it could not be page-locked; None if it is."""
        code = int(_cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            self._locked[address] = nbytes
            return None
        reason = _cudart().cudaGetErrorString(_cudart().cudaError(code))
        _clear_cuda_error()
        return f"{reason} (CUDA error {code})"


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A zero, private, untouched mapping: uint8 [nbytes], aligned to a huge page."""
    try:
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _no_memory(nbytes) from error
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel without huge pages, where small ones do
            raise
    whole = np.frombuffer(mapping, dtype=np.uint8)
    head = -whole.ctypes.data % HUGE_PAGE
    return whole[head : head + nbytes]


def _populate(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], *, threads: int) -> None:
    """Fault every page in, once, from several threads."""
    libc = ctypes.CDLL(None, use_errno=True)  # ctypes lets go of the GIL during the call
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def touch(start: int) -> None:
        piece = memory[start : start + TOUCH_PIECE]
        if libc.madvise(piece.ctypes.data, len(piece), MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() != errno.EINVAL:  # EINVAL: a kernel before 5.14
            raise _no_memory(len(memory))
        piece[:: mmap.PAGESIZE] = 0

    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="touch") as pool:
        for done in [pool.submit(touch, start) for start in range(0, len(memory), TOUCH_PIECE)]:
            done.result()


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _no_memory(nbytes: int) -> DoesNotFit:
    return DoesNotFit(
        f"the system did not give {_gib(nbytes)} of host memory",
        hint="a smaller model, a smaller memory.micro_batch with memory.activations: host, or more RAM",
    )


def _clear_cuda_error() -> None:
    """Take the failed registration out of CUDA's error state; the next kernel launch would report it as its own."""
    libraries = re.findall(r"/\S*libcudart\S*\.so\S*", Path("/proc/self/maps").read_text())
    for path in dict.fromkeys(libraries):
        ctypes.CDLL(path).cudaGetLastError()
