"""What is slow about a machine and why, from what was measured and what the system says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.optim.threads import usable_cores
from megatrain.plan.hardware import Limit
from megatrain.train.examination import UPDATE_BYTES, Examination
from megatrain.train.gpus import GpuFacts
from megatrain.train.ways import words_for_old

LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
"""PCIe per lane and direction, by generation, as the standard has it."""
REACHED = 0.8
"""Of a link's own rate, what large page-locked copies reach where nothing is wrong."""
NEAR_COPY = 0.85
"""Of the memory's copy rate, what AdamW should reach."""


@dataclass(frozen=True)
class Facts:
    """What the system says of itself."""

    cpu: str
    cores: int  # usable: affinity and cgroup quota
    cores_online: int
    numa_nodes: int  # with memory
    numa_nodes_allowed: int  # on which this process may run
    huge_pages: str  # "always", "madvise", "never", "" where the kernel has none
    omp_num_threads: str  # "" where it is not set


def read_facts(*, root: Path = Path("/"), environ: dict[str, str] | None = None) -> Facts:
    """`root` holds proc/ and sys/."""
    nodes = _cpus_by_node(root)
    mine = os.sched_getaffinity(0)
    settings = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = settings.partition("[")[2].partition("]")[0]
    environ = dict(os.environ) if environ is None else environ
    return Facts(
        cpu=_cpu_name(root),
        cores=usable_cores(),
        cores_online=os.cpu_count() or 1,
        numa_nodes=max(1, len(nodes)),
        numa_nodes_allowed=max(1, sum(bool(cpus & mine) for cpus in nodes)),
        huge_pages=chosen,
        omp_num_threads=environ.get("OMP_NUM_THREADS", ""),
    )


def findings(found: Examination, *, facts: Facts, gpu: GpuFacts | None, page_lock: Limit | None) -> tuple[str, ...]:
    """Sentences, the gravest first; none where nothing is wrong."""
    old = None if gpu is None else words_for_old(name=gpu.name, capability=gpu.capability)
    return (
        *(() if old is None else (old,)),
        *_kernel(found),
        *_locking(found, page_lock=page_lock),
        *_link(found, gpu=gpu),
        *_host(found, facts=facts),
    )


def _kernel(found: Examination) -> Iterator[str]:
    if found.isa == "torch":
        yield (
            "the AdamW kernel is missing: updates run in plain torch, several times slower. Install a C++ compiler "
            "and run `python -m megatrain.optim.kernel.build`"
        )
    elif found.isa == "scalar":
        yield "this CPU has neither AVX2 nor AVX-512: AdamW runs one parameter at a time"
    elif UPDATE_BYTES * found.update_params_per_s < NEAR_COPY * found.copy_bytes_per_s:
        share = UPDATE_BYTES * found.update_params_per_s / found.copy_bytes_per_s
        yield (
            f"AdamW moves {share:.0%} of what memory can: the CPU is the limit"
            f"{', AVX-512 would help' if found.isa == 'avx2' else ''}"
        )


def _locking(found: Examination, *, page_lock: Limit | None) -> Iterator[str]:
    if found.page_lock_failure is not None:
        yield (
            f"{found.page_lock_failure}: what is beyond stays pageable, and is copied several times slower. Raise the "
            "limit (ulimit -l unlimited, docker --ulimit memlock=-1)"
        )
    if page_lock is not None:
        yield f"{page_lock.source}: {page_lock.bytes / 2**30:.1f} GiB"


def _link(found: Examination, *, gpu: GpuFacts | None) -> Iterator[str]:
    into, duplex = found.link_in_bytes_per_s, found.link_duplex_bytes_per_s
    if gpu is None or into is None or duplex is None:
        return
    slot = LANE_BYTES.get(gpu.link_generation, 0.0) * gpu.link_width
    best = LANE_BYTES.get(gpu.link_generation_max, 0.0) * gpu.link_width_max
    if gpu.link_width and gpu.link_width < gpu.link_width_max:
        yield f"the slot gives the card {gpu.link_width} of its {gpu.link_width_max} PCIe lanes: {into / 1e9:.1f} GB/s"
    elif best and into < REACHED * LANE_BYTES[4] * 16 and gpu.link_generation_max <= 3:
        yield f"a PCIe generation {gpu.link_generation_max} link: {into / 1e9:.1f} GB/s, a quarter of generation 5"
    elif best and into < REACHED * best:
        now = f"generation {gpu.link_generation} x{gpu.link_width}, which can do {slot / 1e9:.0f} GB/s"
        yield (
            f"page-locked copies reach {into / 1e9:.1f} GB/s of the link's {best / 1e9:.0f} (now {now}): "
            "a slower slot, a switch in between, or memory on another NUMA node"
        )
    if duplex < 0.6 * into:
        rates = f"{duplex / 1e9:.1f} GB/s each way, {into / 1e9:.1f} alone"
        yield f"the link is slow where both directions are busy: {rates}"


def _host(found: Examination, *, facts: Facts) -> Iterator[str]:
    if facts.numa_nodes_allowed < facts.numa_nodes:
        yield (
            f"this process may run on {facts.numa_nodes_allowed} of {facts.numa_nodes} NUMA nodes (affinity, numactl, "
            "cpuset): it has that share of the memory's bandwidth"
        )
    if facts.cores < facts.cores_online:
        yield f"{facts.cores} of {facts.cores_online} cores may be used (affinity or cgroup quota)"
    if facts.huge_pages == "never":
        yield (
            "transparent huge pages are off: taking and page-locking memory takes about three times as long "
            "(/sys/kernel/mm/transparent_hugepage/enabled: madvise is enough)"
        )
    if facts.omp_num_threads.isdigit() and int(facts.omp_num_threads) < facts.cores and found.gpu is None:
        yield (
            f"OMP_NUM_THREADS={facts.omp_num_threads}: layers on the CPU use so many threads; the optimizer uses "
            f"{found.threads} whatever it says"
        )


def _cpus_by_node(root: Path) -> list[set[int]]:
    """The CPUs of every node that has memory and CPUs."""
    found = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cpus = _ranges(_text(folder / "cpulist"))
        if cpus:
            found.append(cpus)
    return found


def _ranges(text: str) -> set[int]:
    """ "0-3,8" as {0, 1, 2, 3, 8}."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def _cpu_name(root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
