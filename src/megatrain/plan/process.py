"""What the process holds beside what it allocates for training: libraries, the CUDA driver's part, the compiler.

It cannot be known before it is there, so it was measured (peak resident memory less what was planned and is
accounted for), with PyTorch 2.11 and transformers 5:

* on an H200 host, from the runs in benchmarks/h200.md: 3.9 GiB for the 7B shape, 3.4 GiB for 3B, 1.1 GiB less
  where nothing was compiled;
* on the CPU: `benchmarks/memory_check.py`.
"""

from __future__ import annotations

MIB = 1 << 20
CUDA_BYTES = 2800 * MIB
"""Python, PyTorch, transformers and the CUDA libraries with a context, once kernels ran."""
COMPILER_BYTES = 1100 * MIB
"""Inductor, Triton and what they compiled, in this process."""
CPU_BYTES = 640 * MIB
"""Python, PyTorch and transformers, once layers ran on the CPU."""


def libraries_bytes(*, on_cuda: bool, compiled: bool, process_bytes: int) -> int:
    """What the process will hold of code beyond the `process_bytes` that it holds now."""
    libraries = CUDA_BYTES if on_cuda else CPU_BYTES
    return max(0, libraries - process_bytes) + (COMPILER_BYTES if compiled else 0)
