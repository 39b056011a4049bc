"""Where a step that is not finite went wrong: in which rows, and in which layers' gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.host.store import HostStore
from megatrain.stream.step import StepOutput
from megatrain.train.run import StepRows

_SHOWN = 4


@dataclass(frozen=True)
class Fault:
    """Rows as "file: row 7". Units by name, in the order of the backward: where it begins comes first."""

    rows: tuple[str, ...]  # of the micro-batches whose loss is not finite; of all where each is finite by itself
    rows_known: bool  # the loss told which
    units: tuple[str, ...]  # whose gradient is not finite
    everywhere: bool

    def __str__(self) -> str:
        which = "in" if self.rows_known else "somewhere in"
        layers = "; every layer's gradient is affected" if self.everywhere else ""
        if self.units and not self.everywhere:
            layers = f"; the gradient of {_some(self.units)} is not finite"
        return f"{which} {_some(self.rows)}{layers}"


def locate(output: StepOutput, *, rows: StepRows, micro_batch: int, store: HostStore) -> Fault:
    """Reads back what the step left on the device; its result must have been asked for."""
    parts = output.parts()
    origins = rows.origins(micro_batch)
    bad = [m for m, loss in enumerate(parts.losses) if not math.isfinite(loss)]
    chosen = bad or range(len(origins))
    named = dict.fromkeys(name for m in chosen for name in origins[m])
    units = [unit for unit in sorted(parts.unit_norms, reverse=True) if not math.isfinite(parts.unit_norms[unit])]
    return Fault(
        rows=tuple(named),
        rows_known=bool(bad),
        units=tuple(store.units[unit].unit.name for unit in units),
        everywhere=len(units) == len(parts.unit_norms),
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
