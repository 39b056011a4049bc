"""How far a step is from what the machine could do: the speed of light of the plan, from rates known or measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.rates import Rates, assumed_rates, known_gpu
from megatrain.plan.speed import SpeedEstimate, estimate


@dataclass(frozen=True)
class Yardstick:
    """One plan on one machine. moment_bytes: of an element of each of the optimizer's moments."""

    sizes: ModelSizes
    plan: MemoryPlan
    moment_bytes: int
    rates: Rates

    def estimate(self, tokens: int) -> SpeedEstimate:
        """Of a step of so many tokens."""
        return estimate(self.sizes, plan=self.plan, rates=self.rates, tokens=tokens, moment_bytes=self.moment_bytes)

    def share(self, *, step_s: float, tokens: int) -> float:
        """The machine's limit over the step's time, 0 to 1: padding and everything exposed make it smaller."""
        return min(1.0, self.estimate(tokens).light_s / step_s) if step_s > 0 else 1.0

    def measured(
        self, *, optimizer_s: float, link_in_bytes: float | None = None, link_out_bytes: float | None = None
    ) -> Yardstick:
        """The same with this machine's own rates where they were measured: of an update, and inside copies."""
        rates, assumed_s = self.rates, self.estimate(1).optimizer_s
        host = rates.host_bytes * assumed_s / optimizer_s if optimizer_s and assumed_s else rates.host_bytes
        into, out = link_in_bytes or rates.link_in_bytes, link_out_bytes or rates.link_out_bytes
        duplex = rates.link_duplex_bytes * min(into / rates.link_in_bytes, out / rates.link_out_bytes)
        return replace(
            self,
            rates=replace(rates, host_bytes=host, link_in_bytes=into, link_out_bytes=out, link_duplex_bytes=duplex),
        )


def yardstick(sizes: ModelSizes, *, plan: MemoryPlan, device_name: str, moment_bytes: int) -> Yardstick | None:
    """None where the device's peak is not known: a distance to a guess says nothing."""
    if plan.on_cpu or known_gpu(device_name) is None:
        return None
    return Yardstick(sizes, plan, moment_bytes, assumed_rates(device_name, cores=plan.threads))
