"""Compiles the kernel into its package: at installation (setup.py), or by ``python -m megatrain.optim.kernel.build``.

Imports nothing of the project, because setup.py runs it where nothing is installed yet.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY_NAME = "libmegatrain_adamw.so"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra",
    "-fno-exceptions", "-fno-rtti",  # no C++ runtime library, so only glibc is needed where it runs
    "-ffp-contract=off",  # contractions are written out; see definition.py
    "-fno-math-errno",  # sqrt is an instruction
    "-fno-trapping-math",  # lets the scalar loop be vectorised; changes no result
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
SOURCES: dict[str, tuple[str, ...]] = {  # and the flags of their instruction set
    "abi.cpp": (),
    "pool.cpp": (),
    "step_scalar.cpp": (),
    "step_avx2.cpp": ("-mavx2", "-mfma"),
    "step_avx512.cpp": ("-mavx512f", "-mfma"),
}


class BuildFailed(Exception):
    """No compiler, or it refused; the message says which and why."""


def build(folder: Path = HERE) -> Path:
    """Compile the kernel and put the library in `folder`. Raises BuildFailed."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory() as work:

        def compile_one(source: str) -> str:
            target = () if platform.machine() != "x86_64" else SOURCES[source]
            output = str(Path(work, source).with_suffix(".o"))
            _run([*compiler, *FLAGS, *target, "-c", str(HERE / source), "-o", output])
            return output

        with ThreadPoolExecutor(len(SOURCES)) as pool:
            objects = list(pool.map(compile_one, SOURCES))
        fresh = Path(work, LIBRARY_NAME)
        _run([*compiler, *objects, *LINK_FLAGS, "-o", str(fresh)])
        folder.mkdir(parents=True, exist_ok=True)
        # Under another name first: a process that has the old library mapped keeps it whole.
        aside = folder / f".{LIBRARY_NAME}.{os.getpid()}"
        shutil.copyfile(fresh, aside)
        return aside.replace(folder / LIBRARY_NAME)


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    if named:
        return named.split()
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildFailed(f"no C++ compiler found (looked for {', '.join(COMPILERS)}; CXX names another)")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr.strip()}")


if __name__ == "__main__":
    try:
        print(build())
    except BuildFailed as failure:
        sys.exit(f"the AdamW kernel was not built: {failure}")
