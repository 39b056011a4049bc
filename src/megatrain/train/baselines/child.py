"""The process of a baseline: run as ``python -m megatrain.train.baselines.NAME WORK.json``, it prints one JSON object.

It dies with the process that waits for it, and is the first to go when the host runs out of memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatrain.report.process import host_peak_bytes, vram_by_driver
from megatrain.train.baselines.work import Work

WARMUP_STEPS = 2
_PR_SET_PDEATHSIG = 1


def begin() -> Work:
    """Tie this process to its parent and read what is to be done. Called first."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")
    return Work.read(Path(sys.argv[1]))


def measure(work: Work, *, name: str, step: Callable[[int], float]) -> None:
    """Warm up, time, print. `step(number)` runs one optimizer step and returns its loss."""
    losses = [step(number) for number in range(WARMUP_STEPS)]
    _synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = []
    for number in range(WARMUP_STEPS, WARMUP_STEPS + work.steps):
        began = time.perf_counter()
        losses.append(step(number))
        _synchronize()
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    result = {
        "baseline": name,
        "step_s": median,
        "step_s_min": min(times),
        "step_s_max": max(times),
        "tokens_per_s": work.tokens_per_step / median,
        "vram_peak_bytes": _vram_peak_bytes(work),
        "host_peak_bytes": host_peak_bytes(),
        "losses": [loss if loss - loss == 0.0 else None for loss in losses],  # JSON has no NaN
    }
    print(json.dumps(result), flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _vram_peak_bytes(work: Work) -> int:
    """The driver's count with PyTorch's pool at its peak."""
    if not torch.cuda.is_available():
        return 0
    held = vram_by_driver(os.getpid())
    if held is None:
        free, total = torch.cuda.mem_get_info()
        held = total - free - work.other_vram_bytes
    return held + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
