"""The largest micro-batch that fits, and where activations wait.

The rule is simple on purpose. Two weight slots. Of the cuts of the step into micro-batches, from the
largest useful one down, the first that fits; its activations wait on the device if that fits, in host
memory otherwise. It looks at limits only, which do not change from run to run: the same recipe on the same
machine is cut the same way, and so gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatrain.errors import DoesNotFit
from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import LOAD_BUFFERS, MemoryPlan, account
from megatrain.plan.hardware import DeviceMemory, HostMemory, Limit
from megatrain.plan.refusal import does_not_fit, gib
from megatrain.plan.settings import MemorySettings

__all__ = ["Limits", "MemoryPlan", "plan"]

GIB = 1 << 30
USEFUL_TOKENS = 16_384
"""Tokens of a micro-batch beyond which kernels get no faster; a larger one only costs memory."""
CONTEXT_BYTES = 640 << 20
"""CUDA context, loaded kernels and cuBLAS workspaces, where the caller has not measured them."""
DEVICE_SHARE = 0.9
"""Of a whole device, what `memory.vram: auto` takes: the rest is fragmentation and other programs' margin."""
HOST_RESERVE = 2 * GIB
"""Left to the system and the page cache under an automatic host limit (5 % of smaller machines)."""


@dataclass(frozen=True)
class Limits:
    """What the machine gives. `device` None: compute runs on the CPU, and its buffers lie in host memory."""

    host: HostMemory
    device: DeviceMemory | None
    threads: int  # for the optimizer, where the recipe leaves it open
    context_bytes: int = CONTEXT_BYTES


def plan(
    sizes: ModelSizes,
    *,
    memory: MemorySettings,
    batch_size: int,
    seq_len: int,
    packed: bool,
    limits: Limits,
    stem_shared: bool = True,
    dense_masks: bool = True,
    moment_bytes: int = 4,
    kept: MemoryPlan | None = None,
) -> MemoryPlan:
    """Choose the micro-batch and where activations wait. Raises DoesNotFit with the numbers and what to change.

    batch_size: rows per step. seq_len: the longest row in tokens. stem_shared: the tail or the layers
    read tensors of the stem (a tied head). dense_masks: the attention in use needs a
    mask of seq_len^2 bytes for rows that are packed (several documents) or padded (several rows at once).
    moment_bytes: per element of each of the optimizer's two moments.
    kept: the plan of a run that goes on; what decides rounding (micro-batch, head chunk) stays as it was.
    """
    host_limit, device_limit = _ceilings(memory, limits)
    smallest: MemoryPlan | None = None
    for micro_batch, activations in _cuts(memory, batch_size=batch_size, seq_len=seq_len, kept=kept):
        chosen = account(
            MemoryPlan(
                micro_batch=micro_batch,
                micro_batches=-(-batch_size // micro_batch),
                seq_len=seq_len,
                slots=2 if isinstance(memory.slots, str) else memory.slots,
                grad_buffers=min(2, len(sizes.layers)),
                activations=activations,
                load_buffers=LOAD_BUFFERS if activations == "host" else 0,
                input_bytes=micro_batch * seq_len * sizes.hidden_bytes_per_token,
                head_chunk=kept.head_chunk if kept else 0,
                threads=limits.threads if isinstance(memory.threads, str) else memory.threads,
                host={},
                device={},
                host_limit=host_limit,
                device_limit=device_limit,
                on_cpu=limits.device is None,
            ),
            sizes=sizes,
            stem_shared=stem_shared,
            dense_masks=dense_masks and (packed or micro_batch > 1),
            context_bytes=limits.context_bytes if limits.device is not None else 0,
            process_bytes=limits.host.process_bytes,
            reserve=_reserve(memory, host_limit),
            moment_bytes=moment_bytes,
        )
        if chosen.fits:
            _check_available(chosen, memory=memory, limits=limits)
            return chosen
        smallest = chosen
    assert smallest is not None
    raise does_not_fit(smallest, memory=memory)


def _cuts(
    memory: MemorySettings, *, batch_size: int, seq_len: int, kept: MemoryPlan | None
) -> Iterator[tuple[int, str]]:
    places = ("device", "host") if memory.activations == "auto" else (memory.activations,)
    cuts = _micro_batches(memory, batch_size=batch_size, seq_len=seq_len)
    for rows in [kept.micro_batch] if kept and isinstance(memory.micro_batch, str) else cuts:
        for place in places:
            yield rows, place


def _micro_batches(memory: MemorySettings, *, batch_size: int, seq_len: int) -> Iterator[int]:
    """Rows at once, best first: every distinct way to cut the step into equal parts, none beyond the useful size."""
    if not isinstance(memory.micro_batch, str):
        yield min(memory.micro_batch, batch_size)
        return
    last = 0
    largest = max(1, USEFUL_TOKENS // seq_len)
    for parts in range(-(-batch_size // largest), batch_size + 1):
        rows = -(-batch_size // parts)
        if rows != last:
            yield rows
        last = rows


def _ceilings(memory: MemorySettings, limits: Limits) -> tuple[Limit, Limit | None]:
    host = limits.host.limit
    if not isinstance(memory.host, str) and (memory.host < host.bytes or limits.host.may_grow):
        host = Limit(memory.host, "memory.host")
    stated = None if isinstance(memory.vram, str) else Limit(memory.vram, "memory.vram")
    if limits.device is None:
        return host, stated
    card = limits.device
    usable = Limit(int(card.total_bytes * DEVICE_SHARE), f"90 % of {card.name}")
    if card.free_bytes < usable.bytes:
        usable = Limit(card.free_bytes, f"free on {card.name}")
    if stated is None:
        return host, usable
    return host, stated if stated.bytes <= card.free_bytes else Limit(card.free_bytes, f"free on {card.name}")


def _reserve(memory: MemorySettings, host_limit: Limit) -> int:
    return min(HOST_RESERVE, host_limit.bytes // 20) if isinstance(memory.host, str) else 0


def _check_available(chosen: MemoryPlan, *, memory: MemorySettings, limits: Limits) -> None:
    if limits.host.may_grow and not isinstance(memory.host, str):
        return  # what is free now says nothing about what will be plugged in
    needed = chosen.host_total - chosen.host.get("left to the system", 0)
    available = limits.host.available
    if needed > available.bytes:
        raise DoesNotFit(
            f"the run needs {gib(needed)} of host memory and {gib(available.bytes)} is free now ({available.source})",
            hint=f"end what else holds memory on this machine; the limit itself is {gib(chosen.host_limit.bytes)}",
        )
