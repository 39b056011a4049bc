"""Runs baselines in child processes: each gets the whole machine, and one that does not fit costs us nothing.

A child is the leader of a session of its own; however we leave, it and what it started are ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import UsageError
from megatrain.optim.threads import usable_cores
from megatrain.plan.hardware import read_host_memory
from megatrain.train.baselines.work import Work
from megatrain.units import format_size

NAMES = ("resident", "fsdp", "deepspeed")
TIMEOUT_S = 900
POLL_S = 0.2
SPARE_BYTES = 1 << 30
"""Host memory that is left when a child is ended, or a fiftieth of all: before the system ends whom it likes."""


@dataclass(frozen=True)
class Baseline:
    """What a baseline measured, or why it did not."""

    name: str
    result: dict[str, object]
    failure: str | None

    @property
    def tokens_per_s(self) -> float | None:
        return self._number("tokens_per_s") if self.failure is None else None

    @property
    def seconds(self) -> float:
        return self._number("step_s")

    @property
    def vram_peak_bytes(self) -> int:
        return int(self._number("vram_peak_bytes"))

    @property
    def host_peak_bytes(self) -> int:
        return int(self._number("host_peak_bytes"))

    @property
    def words(self) -> str:
        return self.failure if self.failure is not None else f"{self._number('tokens_per_s'):,.0f} tok/s"

    def _number(self, key: str) -> float:
        value = self.result.get(key, 0)
        return float(value) if isinstance(value, int | float) else 0.0


def parse_names(text: str) -> tuple[str, ...]:
    """Names from ``resident,fsdp``. Raises UsageError for one that is unknown."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in NAMES:
            raise UsageError(f"there is no baseline {name!r}", where="--baseline", hint=f"one of {', '.join(NAMES)}")
    return names


def run_baselines(
    names: Sequence[str], *, work: Work, timeout_s: float = TIMEOUT_S, tell: Callable[[str], None] = lambda text: None
) -> list[Baseline]:
    """One after another, in the order given. `tell` hears how it goes."""
    done = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "work.json")
        work.write(path)
        for name in names:
            tell(f"{name} runs, {timeout_s:g} s at most")
            command = [sys.executable, "-m", f"megatrain.train.baselines.{name}", str(path)]
            done.append(run_child(name, command=command, folder=Path(folder), timeout_s=timeout_s))
            tell(f"{name}: {done[-1].words}")
    return done


def run_child(name: str, *, command: Sequence[str], folder: Path, timeout_s: float) -> Baseline:
    """Run one baseline to its end, its limit of time, or the host's limit of memory. `folder` takes its output."""
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        watch = _HostWatch()
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=_environment(), start_new_session=True)
        try:
            stopped = _wait(child, watch=watch, timeout_s=timeout_s)
        finally:
            _end(child)
    if stopped is not None:
        return Baseline(name, {}, stopped)
    lines = [line for line in _text(out).splitlines() if line.startswith('{"baseline"')]
    if child.returncode == 0 and lines:
        return Baseline(name, json.loads(lines[-1]) | {"host_grown_bytes": watch.grown_bytes}, None)
    return Baseline(name, {}, reason(_text(err), code=child.returncode))


def reason(stderr: str, *, code: int) -> str:
    """Why a child failed, in a few words."""
    if "OutOfMemoryError" in stderr:
        return "does not fit in VRAM"
    if code == -signal.SIGKILL:
        return "does not fit in host memory (killed)"
    if any(sign in stderr for sign in ("CUDA error: out of memory", "cudaErrorMemoryAllocation", "MemoryError")):
        return "does not fit in host memory (page-locking was refused)"
    if "DefaultCPUAllocator" in stderr or "not enough memory" in stderr:
        return "does not fit in host memory"
    if "No module named 'deepspeed'" in stderr:
        return "is not installed (pip install megatrain[deepspeed])"
    last = [line for line in stderr.splitlines() if line.strip()]
    return last[-1].strip()[:200] if last else f"ended with exit code {code}"


def _wait(child: subprocess.Popen[bytes], *, watch: _HostWatch, timeout_s: float) -> str | None:
    """Wait for the child; why it has to be ended, if it has to."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=POLL_S)
            return None
        if watch.exhausted():
            return (
                f"does not fit in host memory ({format_size(watch.limit_bytes)}, {watch.limit_source}; "
                f"{format_size(watch.before_bytes)} were in use before)"
            )
        if time.monotonic() > deadline:
            return f"not done after {timeout_s:g} s"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole session, and wait: its memory is needed."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _environment() -> dict[str, str]:
    """Ours, with as many threads for the child's CPU optimizer as the machine gives, whatever was set for us."""
    return os.environ | {"OMP_NUM_THREADS": str(usable_cores()), "TOKENIZERS_PARALLELISM": "false"}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


class _HostWatch:
    """How much of the host's memory is used, since this began."""

    def __init__(self) -> None:
        host = read_host_memory()
        self.limit_bytes, self.limit_source = host.limit.bytes, host.limit.source
        self._may_grow = host.may_grow  # what is free now says nothing about what will be plugged in
        self.before_bytes = self._most = self._used()

    @property
    def grown_bytes(self) -> int:
        """The most that was used beyond what was used at the beginning, by everybody on this host."""
        return self._most - self.before_bytes

    def exhausted(self) -> bool:
        self._most = max(self._most, self._used())
        spare = max(SPARE_BYTES, self.limit_bytes // 50)
        return not self._may_grow and read_host_memory().available.bytes < spare

    @staticmethod
    def _used() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        return total - available
