"""Which resource a step spends most of its time under, from what was measured of it."""

from __future__ import annotations

START_SHARE = 0.25
"""Of an update: where less of it is exposed, only its beginning is, which no forward can hide."""
ENQUEUED_S, ENQUEUED_SHARE = 0.02, 0.1
"""A device that is done so soon after the step's last kernel was enqueued had been waiting for kernels."""


def bound_by(
    *,
    step_s: float,
    optimizer_s: float,
    exposed_optimizer_s: float,
    exposed_transfer_s: float,
    waited_s: float | None = None,
) -> str:
    """ "compute", "optimizer", "link" or "launches". Seconds.

    waited_s: how long the host waited for the device when all of the step was enqueued; None where nothing is enqueued.
    "launches" is what computes, where the host does not keep ahead of it: kernels are short.

    Where a good part of the update is exposed, the forward that it runs under is as long as the update: all of it
    then counts for the optimizer, not only what is exposed.
    """
    follows = exposed_optimizer_s > START_SHARE * optimizer_s
    optimizer = min(max(optimizer_s, exposed_optimizer_s), step_s) if follows else exposed_optimizer_s
    compute = step_s - optimizer - exposed_transfer_s
    held = {"compute": compute, "optimizer": optimizer, "link": exposed_transfer_s}
    holder = max(held, key=lambda name: held[name])
    if holder == "compute" and waited_s is not None and waited_s < min(ENQUEUED_S, ENQUEUED_SHARE * step_s):
        return "launches"
    return holder
