"""How far a step is from what the machine could do: the speed of light of the plan, from rates known or measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.plan.rates import Rates, assumed_rates, known_gpu
from megatrain.plan.speed import SpeedEstimate, estimate
from megatrain.train.build import Planned

MOMENT_BYTES = {"fp32": 4, "bf16": 2}
"""Of an element of each moment, by optimizer.state."""


@dataclass(frozen=True)
class Yardstick:
    """One plan on one machine."""

    planned: Planned
    rates: Rates

    def estimate(self, tokens: int) -> SpeedEstimate:
        """Of a step of so many tokens."""
        recipe = self.planned.recipe
        return estimate(
            self.planned.model.sizes,
            plan=self.planned.plan,
            rates=self.rates,
            tokens=tokens,
            moment_bytes=MOMENT_BYTES.get(recipe.optimizer.state, 4),
        )

    def share(self, *, step_s: float, tokens: int) -> float:
        """The machine's limit over the step's time, 0 to 1: padding and everything exposed make it smaller."""
        return min(1.0, self.estimate(tokens).light_s / step_s)

    def measured(
        self, *, tokens: int, optimizer_s: float, link_in_bytes: float | None, link_out_bytes: float | None
    ) -> Yardstick:
        """The same with this machine's own rates where they were measured: of updates, and inside copies."""
        rates, assumed_s = self.rates, self.estimate(tokens).optimizer_s
        host = rates.host_bytes * assumed_s / optimizer_s if optimizer_s and assumed_s else rates.host_bytes
        into, out = link_in_bytes or rates.link_in_bytes, link_out_bytes or rates.link_out_bytes
        duplex = rates.link_duplex_bytes * min(into / rates.link_in_bytes, out / rates.link_out_bytes)
        return replace(
            self,
            rates=replace(rates, host_bytes=host, link_in_bytes=into, link_out_bytes=out, link_duplex_bytes=duplex),
        )


def yardstick(planned: Planned) -> Yardstick | None:
    """None where the device's peak is not known: a distance to a guess says nothing."""
    if not planned.on_cuda or known_gpu(planned.device_name) is None:
        return None
    return Yardstick(planned, assumed_rates(planned.device_name, cores=planned.plan.threads))
