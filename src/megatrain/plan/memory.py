"""The largest micro-batch that fits, where activations wait, and what to do with device memory that is left.

The rule is simple on purpose. Two weight slots. Of the cuts of the step into micro-batches, from the
largest useful one down, the first that fits; its activations wait on the device if that fits, in host
memory otherwise. What is then left of the device keeps units there (spend.py). It looks at limits only, which do
not change from run to run: the same recipe on the same machine is cut the same way, and so gives the same bits.
"""

from __future__ import annotations

from megatrain.errors import DoesNotFit
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import attempt
from megatrain.plan.job import CONTEXT_BYTES, HOST_RESERVE, Job, Limits
from megatrain.plan.refusal import does_not_fit
from megatrain.plan.words import gib

__all__ = ["CONTEXT_BYTES", "HOST_RESERVE", "Limits", "MemoryPlan", "decide"]


def decide(job: Job) -> MemoryPlan:
    """The plan of a run on this machine, now. Raises DoesNotFit with the numbers and what to change."""
    chosen = attempt(job)
    if not chosen.fits:
        raise does_not_fit(job, short=chosen)
    shortage = unavailable(chosen, job=job)
    if shortage is not None:
        raise shortage
    return chosen


def unavailable(chosen: MemoryPlan, *, job: Job) -> DoesNotFit | None:
    """The refusal of a plan that fits the machine, but not what other programs leave of it now."""
    host = job.limits.host
    if host.may_grow and not isinstance(job.memory.host, str):
        return None  # what is free now says nothing about what will be plugged in
    needed = chosen.host_total - chosen.host.get("left to the system", 0)
    if needed <= host.available.bytes:
        return None
    free = f"{gib(host.available.bytes)} is free now ({host.available.source})"
    return DoesNotFit(
        f"the run needs {gib(needed)} of host memory and {free}",
        hint=f"end what else holds memory on this machine; the limit itself is {gib(chosen.host_limit.bytes)}",
    )
