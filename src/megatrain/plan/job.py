"""Everything that planning is asked about, in one value: change a field, and plan again."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import MemoryPlan, Terms
from megatrain.plan.hardware import DeviceMemory, HostMemory, Limit
from megatrain.plan.settings import MemorySettings

CONTEXT_BYTES = 640 << 20
"""CUDA context, loaded kernels and cuBLAS workspaces, where the caller has not measured them."""
DEVICE_SHARE = 0.9
"""Of a whole device, what `memory.vram: auto` takes: the rest is fragmentation and other programs' margin."""
MOMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Of an element of each of the optimizer's two moments, by optimizer.state."""
HOST_RESERVE = 2 << 30
"""Left to the system and the page cache under an automatic host limit (5 % of smaller machines)."""


@dataclass(frozen=True)
class Limits:
    """What the machine gives. `device` None: compute runs on the CPU, and its buffers lie in host memory."""

    host: HostMemory
    device: DeviceMemory | None
    threads: int  # for the optimizer, where the recipe leaves it open
    context_bytes: int = CONTEXT_BYTES
    libraries_bytes: int = 0  # what the process will hold of libraries and compiler, beyond what it holds now
    page_lock: Limit | None = None  # how much can be page-locked, where that is less than memory


@dataclass(frozen=True)
class Settings:
    """The `memory` section of a recipe as planning reads it; a field can be replaced."""

    vram: int | str = "auto"
    host: int | str = "auto"
    micro_batch: int | str = "auto"
    slots: int | str = "auto"
    activations: str = "auto"
    threads: int | str = "auto"
    vram_source: str = "memory.vram"  # who states `vram`

    @classmethod
    def of(cls, memory: MemorySettings) -> Settings:
        return cls(memory.vram, memory.host, memory.micro_batch, memory.slots, memory.activations, memory.threads)


@dataclass(frozen=True)
class Job:
    """A model, a step, a machine.

    seq_len: the longest row in tokens. stem_shared: the tail or the layers read tensors of the stem (a tied head).
    dense_masks: the attention in use needs a mask of seq_len^2 bytes for rows that are packed (several documents) or
    padded (several rows at once). moment_bytes: per element of each of the optimizer's two moments. can_reside: units
    may live on the device and be updated there. compiled: the loss is, and layers where they can be. resumed: the plan
    of a run that goes on; what decides rounding (micro-batch, head chunk) stays as it was.
    """

    sizes: ModelSizes
    memory: Settings
    batch_size: int
    seq_len: int
    packed: bool
    limits: Limits
    stem_shared: bool = True
    dense_masks: bool = True
    moment_bytes: int = 4
    can_reside: bool = False
    compiled: bool = False
    resumed: MemoryPlan | None = None

    @property
    def on_cpu(self) -> bool:
        return self.limits.device is None

    @property
    def reserve(self) -> int:
        """Left to the system."""
        return min(HOST_RESERVE, self.host_limit.bytes // 20) if isinstance(self.memory.host, str) else 0

    @property
    def host_limit(self) -> Limit:
        stated, host = self.memory.host, self.limits.host
        if not isinstance(stated, str) and (stated < host.limit.bytes or host.may_grow):
            return Limit(stated, "memory.host")
        return host.limit

    @property
    def device_limit(self) -> Limit | None:
        """None on the CPU without a stated ceiling."""
        vram, card = self.memory.vram, self.limits.device
        stated = None if isinstance(vram, str) else Limit(vram, self.memory.vram_source)
        if card is None:
            return stated
        usable = Limit(int(card.total_bytes * DEVICE_SHARE), f"90 % of {card.name}")
        if card.free_bytes < usable.bytes:
            usable = Limit(card.free_bytes, f"free on {card.name}")
        if stated is None:
            return usable
        return stated if stated.bytes <= card.free_bytes else Limit(card.free_bytes, f"free on {card.name}")

    def terms(self, *, micro_batch: int) -> Terms:
        """What the accounting needs beside the plan."""
        return Terms(
            sizes=self.sizes,
            stem_shared=self.stem_shared,
            dense_masks=self.dense_masks and (self.packed or micro_batch > 1),
            context_bytes=0 if self.on_cpu else self.limits.context_bytes,
            process_bytes=self.limits.host.process_bytes,
            libraries_bytes=self.limits.libraries_bytes,
            reserve=self.reserve,
            moment_bytes=self.moment_bytes,
            batch_tokens=self.batch_size * self.seq_len,
            compiled=self.compiled,
        )
