"""A plan that does not fit, in words: which limit, by how much, what takes the most, and what to change."""

from __future__ import annotations

from megatrain.errors import DoesNotFit
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.hardware import Limit
from megatrain.plan.settings import MemorySettings

GIB = 1 << 30


def does_not_fit(smallest: MemoryPlan, *, memory: MemorySettings) -> DoesNotFit:
    device_limit = smallest.device_limit
    if device_limit is not None and smallest.device_total > device_limit.bytes:
        return DoesNotFit(
            f"the device needs {gib(smallest.device_total)} and may use {gib(device_limit.bytes)} "
            f"({device_limit.source}), with {_cut(smallest)}: {_table(smallest.device)}",
            hint=_device_hint(memory, device_limit),
        )
    table = smallest.host | ({"compute": smallest.device_total} if smallest.on_cpu else {})
    return DoesNotFit(
        f"host memory of {gib(smallest.host_total)} is needed and {gib(smallest.host_limit.bytes)} may be used "
        f"({smallest.host_limit.source}), with {_cut(smallest)}: {_table(table)}",
        hint=_host_hint(smallest),
    )


def _device_hint(memory: MemorySettings, limit: Limit) -> str:
    steps = ["leave memory.micro_batch at auto"] if not isinstance(memory.micro_batch, str) else []
    steps += ["leave memory.slots at auto"] if not isinstance(memory.slots, str) else []
    steps += ["set memory.activations to auto"] if memory.activations == "device" else []
    steps += ["raise memory.vram"] if limit.source == "memory.vram" else ["free the device of other programs"]
    return ", or ".join([*steps, "lower data.max_seq_len", "lower train.batch_size"])


def _host_hint(smallest: MemoryPlan) -> str:
    steps = ["raise memory.host"] if smallest.host_limit.source == "memory.host" else []
    if "cgroup" in smallest.host_limit.source:
        steps.append("give the container more memory")
    if smallest.activations == "host" or smallest.on_cpu:
        steps.append("lower train.batch_size or data.max_seq_len")
    return ", or ".join([*steps, "use a smaller model or a machine with more memory"])


def _cut(chosen: MemoryPlan) -> str:
    rows = "1 row" if chosen.micro_batch == 1 else f"{chosen.micro_batch} rows"
    return f"{rows} of {chosen.seq_len} tokens at once and activations on the {chosen.activations}"


def _table(purposes: dict[str, int]) -> str:
    largest = sorted(purposes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in largest if size >= GIB // 100)


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
