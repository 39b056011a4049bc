"""Compiles adamw.cu with the host's C++ compiler, so that its arithmetic is checked where there is no GPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

from megatrain.optim.kernel.build import _compiler
from megatrain.optim.kernel.on_device import SOURCE

PRELUDE = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
struct Place { unsigned x; };
static thread_local Place blockIdx, blockDim, threadIdx;
template <class To, class From> static To cast(From from) { To to; std::memcpy(&to, &from, sizeof to); return to; }
static unsigned __float_as_uint(float x) { return cast<unsigned>(x); }
static float __uint_as_float(unsigned x) { return cast<float>(x); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
"""
DRIVER = """
extern "C" void launch(const Run* run, unsigned blocks, unsigned threads) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) megatrain_adamw(*run);
}
"""


def launcher(folder: Path) -> Callable[..., None]:
    """Runs the kernel's threads one after another, in this process."""
    source, library = folder / "adamw.cpp", folder / "adamw.so"
    source.write_text(PRELUDE + SOURCE.read_text() + DRIVER)
    command = [*_compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wno-attributes"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))

    def launch(argument: ctypes.Structure, *, blocks: int, threads: int) -> None:
        loaded.launch(ctypes.byref(argument), ctypes.c_uint(blocks), ctypes.c_uint(threads))

    return launch
