"""A plan that does not fit, in words: which limit, by how much, what takes the most, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.errors import DoesNotFit
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.advice import Advice, advise
from megatrain.plan.job import Job
from megatrain.plan.words import cut, gib, table

MOST = 4
"""Changes named in one hint, and half as many that help but are not enough."""


def does_not_fit(job: Job, *, smallest: MemoryPlan) -> DoesNotFit:
    return DoesNotFit(shortage(smallest), hint=hint(advise(job, short=smallest)))


def shortage(smallest: MemoryPlan) -> str:
    """Which memory is short in a plan that does not fit, and what takes it."""
    device_limit = smallest.device_limit
    if device_limit is not None and not smallest.device_fits:
        return (
            f"the device needs {gib(smallest.device_total)} and may use {gib(device_limit.bytes)} "
            f"({device_limit.source}), with {cut(smallest)}: {table(smallest.device)}"
        )
    purposes = smallest.host | ({"compute": smallest.device_total} if smallest.on_cpu else {})
    return (
        f"host memory of {gib(smallest.host_total)} is needed and {gib(smallest.host_limit.bytes)} may be used "
        f"({smallest.host_limit.source}), with {cut(smallest)}: {table(purposes)}"
    )


def hint(advice: Sequence[Advice]) -> str:
    """The changes in one line."""
    enough = [str(a) for a in advice if a.enough][:MOST]
    helps = [str(a) for a in advice if not a.enough and a.saves]
    if not enough:
        return f"no single change is enough; what helps most: {', '.join(helps[:MOST])}" if helps else _LAST
    first = f"this is enough: {enough[0]}" if len(enough) == 1 else f"one of these is enough: {', or '.join(enough)}"
    return f"{first}; what also helps: {', '.join(helps[: MOST // 2])}" if helps else first


_LAST = "use a smaller model, or a machine with more memory"
