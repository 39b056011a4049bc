"""What the process holds beside what it allocates for training: libraries, the CUDA driver's part, the compiler.

It cannot be known before it is there, so it was measured with PyTorch 2.11 and transformers 5 (benchmarks/h200.md has
resident memory by kind and phase): on an H200 host a process that had planned held 0.95 GiB, and 0.72 GiB more once it
had run two compiled steps, whatever the model; where something streamed, the driver took up to two blocks of half a GiB
for it. On the CPU: `benchmarks/memory_check.py`.
"""

from __future__ import annotations

MIB = 1 << 20
CUDA_BYTES = 1250 * MIB
"""Python, PyTorch, transformers and the CUDA libraries with a context, once kernels ran."""
COMPILER_BYTES = 480 * MIB
"""Inductor, Triton and what they compiled, in this process."""
STREAMING_BYTES = 512 * MIB
"""Shared memory of the CUDA driver where anything streams."""
CPU_BYTES = 640 * MIB
"""Python, PyTorch and transformers, once layers ran on the CPU."""


def libraries_bytes(*, on_cuda: bool, compiled: bool, process_bytes: int) -> int:
    """What the process will hold of code beyond the `process_bytes` that it holds now."""
    libraries = CUDA_BYTES if on_cuda else CPU_BYTES
    return max(0, libraries - process_bytes) + (COMPILER_BYTES if compiled else 0)
