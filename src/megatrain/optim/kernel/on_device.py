"""AdamW of units that live on a CUDA device: the kernel of adamw.cu, launched on the stream that computes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megatrain.optim.kernel import Job, Run, pack

SOURCE = Path(__file__).with_name("adamw.cu")
NAME = "megatrain_adamw"
THREADS = 256
ELEMENTS_PER_THREAD = 4


class Launch(Protocol):
    """A compiled kernel of one struct argument; returns when it is enqueued."""

    def __call__(self, argument: ctypes.Structure, *, blocks: int, threads: int) -> None: ...


class DeviceKernel:
    """`Kernel` for tensors on the device. Bits equal those of the CPU."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def run(self, jobs: Sequence[Job]) -> None:
        """Enqueue the update of everything in `jobs`."""
        for job in jobs:
            if not job.weights.numel():
                continue
            run = Run()
            pack(job, into=run)
            blocks = -(-job.weights.numel() // (THREADS * ELEMENTS_PER_THREAD))
            self._launch(run, blocks=blocks, threads=THREADS)
