"""Which errors say that the device is full: PyTorch's own, and those of libraries that it does not wrap."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import DoesNotFit
from megatrain.train.failure import device_is_full, machine_error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ],
)
def test_a_full_device_is_no_bug_of_ours(error: Exception) -> None:
    assert device_is_full(error)
    assert isinstance(machine_error(error), DoesNotFit)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), MemoryError(), ValueError("x")]
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not device_is_full(error)
