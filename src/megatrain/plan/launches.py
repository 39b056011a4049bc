"""What the host takes to enqueue a step, however short its kernels are."""

from __future__ import annotations

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import MemoryPlan, grouped_experts

FORWARD_S, RECOMPUTE_S, BACKWARD_S = 0.7e-3, 0.9e-3, 1.8e-3
"""Of a layer at a micro-batch: Python, guards and launches of a compiled layer (Qwen2.5 3B). Together 2.9 ms on one
host with an H200 and 4.0 on another, where kernels were short; the shares are a profile's."""
GROUP_FORWARD_S, GROUP_BACKWARD_S = 0.4e-3, 0.9e-3
"""Of a group of experts at a micro-batch. On a CPU, with tensors so small that only Python and dispatch count, a group
took 0.37 of what a whole layer took, forward, recompute and backward: that share of the figures above."""
SLICE_S = 2.3e-3
"""Of a slice of the head at a micro-batch, log-sum-exp and slope, which are not compiled. One trace on the slower of
those hosts had 1.4 s for 16 slices and 32 micro-batches, 2.7 ms each; this is that for a host between the two."""


def launch_s(sizes: ModelSizes, *, plan: MemoryPlan) -> tuple[float, float]:
    """The host's seconds in the forward, and in head and backward; on the CPU nothing is enqueued.

    Layers whose experts come in groups run up to these, and then once more, forwards and backwards.
    """
    if plan.on_cpu:
        return 0.0, 0.0
    layers, experts = len(sizes.layers), grouped_experts(plan, sizes=sizes)
    divided, groups = (0, 0) if experts is None else (experts.divided, experts.count * experts.divided)
    recomputed = max(0, layers - plan.kept)
    forward = (layers + divided) * FORWARD_S + groups * GROUP_FORWARD_S
    backward = (recomputed + divided) * RECOMPUTE_S + layers * BACKWARD_S + groups * GROUP_BACKWARD_S
    return plan.micro_batches * forward, plan.micro_batches * (backward + plan.head_slices * SLICE_S)
