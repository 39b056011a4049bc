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


def does_not_fit(job: Job, *, short: MemoryPlan) -> DoesNotFit:
    """`short`: the plan that comes nearest."""
    return DoesNotFit(shortage(short), hint=hint(advise(job, short=short)))


def shortage(short: MemoryPlan) -> str:
    """Which memory is short in a plan that does not fit, or that both are, and what takes it."""
    said, device_limit = [], short.device_limit
    if device_limit is not None and not short.device_fits:
        said.append(
            f"the device needs {gib(short.device_total)} and may use {gib(device_limit.bytes)} "
            f"({device_limit.source}), with {cut(short)}: {table(short.device)}"
        )
    if short.host_total > short.host_limit.bytes:
        purposes = short.host | ({"compute": short.device_total} if short.on_cpu else {})
        said.append(
            f"host memory of {gib(short.host_total)} is needed and {gib(short.host_limit.bytes)} may be used "
            f"({short.host_limit.source}), with {cut(short)}: {table(purposes)}"
        )
    return "; and ".join(said)


def hint(advice: Sequence[Advice]) -> str:
    """The changes in one line."""
    enough = [a for a in advice if a.enough]
    named = [str(a) for a in enough][:MOST]
    helps = [str(a) for a in advice if not a.enough and a.saves]
    if not enough:
        return f"no single change is enough; what helps most: {', '.join(helps[:MOST])}" if helps else _LAST
    if all(a.joint for a in enough):
        first = f"no single change is enough, but this is: {named[0]}"
    else:
        first = f"this is enough: {named[0]}" if len(named) == 1 else f"one of these is enough: {', or '.join(named)}"
    return f"{first}; what also helps: {', '.join(helps[: MOST // 2])}" if helps else first


_LAST = "use a smaller model, or a machine with more memory"
