"""Seconds of DeepSpeedCPUAdam's step over N fp32 parameters, each of R repeats: python deepspeed_adam.py N R.

A process of its own, started by adamw_bench.py: DeepSpeed's OpenMP takes its threads from OMP_NUM_THREADS, once.
Prints a JSON list as its last line.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def main(n: int, repeats: int) -> None:
    parameter = torch.nn.Parameter(torch.full((n,), 0.5))
    parameter.grad = torch.full((n,), 1e-3)
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.1, adamw_mode=True)
    optimizer.step()  # makes the moments, and warms up
    optimizer.step()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    print(json.dumps(times))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
