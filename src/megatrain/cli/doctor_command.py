"""``megatrain doctor``: what this machine has, how fast it is, and what is slow about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.cli.output import emit
from megatrain.train.examination import UPDATE_BYTES
from megatrain.units import format_size

if TYPE_CHECKING:
    from megatrain.train.doctor import Diagnosis


def run(*, json: bool) -> int:
    """Measure, keep the result for planning, print it."""
    from megatrain.train.doctor import examine
    from megatrain.train.examination import keep_examination

    found = examine()
    kept = keep_examination(found.examination)
    if json:
        emit(found.to_json() | {"kept": kept})
    else:
        print(_text(found, kept=kept))
    return 0


def _text(found: Diagnosis, *, kept: bool) -> str:
    seen, facts = found.examination, found.facts
    lines = [_gpu(found)]
    if seen.link_in_bytes_per_s and seen.link_out_bytes_per_s and seen.link_duplex_bytes_per_s:
        lines.append(
            f"link      {_rate(seen.link_in_bytes_per_s)} to the device, {_rate(seen.link_out_bytes_per_s)} back, "
            f"{_rate(seen.link_duplex_bytes_per_s)} each way at once; pageable {_rate(seen.pageable_in_bytes_per_s)}"
        )
    if seen.page_lock_bytes is not None:
        more = f", then: {seen.page_lock_failure}" if seen.page_lock_failure else ", as much as was tried"
        lines.append(f"page-lock {format_size(seen.page_lock_bytes)}{more}")
    nodes = f"{facts.numa_nodes} NUMA node{'s' if facts.numa_nodes > 1 else ''}"
    pages = facts.huge_pages or "absent"
    lines += [
        f"CPU       {facts.cpu}, {facts.cores} of {facts.cores_online} cores usable, {nodes}, huge pages {pages}",
        f"memory    {format_size(found.memory.limit.bytes)} ({found.memory.limit.source}), "
        f"{format_size(found.memory.available.bytes)} free ({found.memory.available.source})",
        f"copies    {_rate(seen.copy_bytes_per_s)} read and written in host memory, {seen.threads} threads",
        f"AdamW     {seen.update_params_per_s / 1e9:.2f} G parameters/s: it moves "
        f"{_rate(UPDATE_BYTES * seen.update_params_per_s)}, kernel {seen.isa}, {seen.threads} threads",
    ]
    lines += [f"slow:     {line}" for line in found.findings] or ["nothing is slow that should not be"]
    lines.append(f"measured in {found.seconds:.1f} s" + (", kept for estimate-memory" if kept else ""))
    return "\n".join(lines)


def _gpu(found: Diagnosis) -> str:
    gpu = found.gpu
    if gpu is None:
        return f"GPU       none ({found.trouble}); only the host was examined"
    link = f"PCIe {gpu.link_generation} x{gpu.link_width} now, {gpu.link_generation_max} x{gpu.link_width_max} at most"
    trouble = f"; {found.trouble}" if found.trouble else ""
    return (
        f"GPU       {gpu.name}, driver {gpu.driver}, {format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} "
        f"free, {link}{trouble}"
    )


def _rate(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e9:.1f} GB/s"
