"""What `megatrain doctor` measured, kept for planning: by host and GPU, in the user's cache folder."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict, dataclass, replace

from megatrain.model.user_cache import keep, read_kept
from megatrain.plan.rates import Rates

UPDATE_BYTES = 26
"""AdamW with fp32 moments and masters in halves, per parameter: 13 read or written twice."""


@dataclass(frozen=True)
class Examination:
    """Bytes and parameters per second. None: not measured (no GPU, or it failed)."""

    host: str
    gpu: str | None
    threads: int
    isa: str  # instruction path of the AdamW kernel, "torch" without the kernel
    copy_bytes_per_s: float  # memory to memory on the host, reads and writes counted
    update_params_per_s: float  # AdamW
    link_in_bytes_per_s: float | None = None  # page-locked
    link_out_bytes_per_s: float | None = None
    link_duplex_bytes_per_s: float | None = None  # each way
    pageable_in_bytes_per_s: float | None = None
    page_lock_bytes: int | None = None  # as far as it was tried
    page_lock_failure: str | None = None

    def improve(self, rates: Rates) -> Rates:
        """Assumed rates with what was measured in their place."""
        host = UPDATE_BYTES * self.update_params_per_s
        source = f"AdamW moves {host / 1e9:.1f} GB/s of host memory"
        if self.link_in_bytes_per_s and self.link_out_bytes_per_s and self.link_duplex_bytes_per_s:
            rates = replace(
                rates,
                link_in_bytes=self.link_in_bytes_per_s,
                link_out_bytes=self.link_out_bytes_per_s,
                link_duplex_bytes=self.link_duplex_bytes_per_s,
            )
            source += f", link {self.link_in_bytes_per_s / 1e9:.0f} GB/s"
        return replace(
            rates, host_bytes=host, source=f"{rates.source}; instead, measured by megatrain doctor here: {source}"
        )


def keep_examination(found: Examination) -> bool:
    return keep(_name(found.gpu), asdict(found))


def find_examination(gpu: str | None) -> Examination | None:
    """Of this host with this GPU; None if it was not examined, or what was kept is damaged."""
    values = read_kept(_name(gpu))
    if values is None or values.get("host") != platform.node():
        return None
    try:
        found = Examination(**values)
    except TypeError:
        return None
    needed = (found.copy_bytes_per_s, found.update_params_per_s)
    measured = (found.link_in_bytes_per_s, found.link_out_bytes_per_s, found.link_duplex_bytes_per_s)
    numbers = [*needed, *(m for m in measured if m is not None)]
    return found if all(isinstance(n, int | float) and n > 0 for n in numbers) else None


def _name(gpu: str | None) -> str:
    key = f"{platform.node()}\n{gpu or 'no GPU'}"
    return f"doctor/{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
