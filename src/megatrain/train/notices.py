"""What a run is told once on its way: that nothing saves it, that its device is too full to be fast."""

from __future__ import annotations

from megatrain.plan.accounting import MemoryPlan
from megatrain.report.console import Console
from megatrain.stream.device import Device
from megatrain.units import format_seconds

LONG_S = 1800
"""A run that takes longer is told to save on the way."""
FULL_STEPS = 2
"""So many in a row are no coincidence, such as a row that is longer than all before."""
SETTLED = 3
"""Steps of this process after which its times are steady, and its memory is all taken."""


class Notices:
    """Looks at the run after every step."""

    def __init__(self, console: Console, *, device: Device, plan: MemoryPlan, saves: bool, first_step: int) -> None:
        """saves: whether checkpoints are written on the way. first_step: the last one that was complete before."""
        self._console, self._device, self._plan = console, device, plan
        self._settled_at = first_step + SETTLED
        self._reminds = not saves
        self._given_back = 0  # times, until this step began
        self._full_steps = 0  # in a row
        self._said_full = False

    def before(self) -> None:
        """A step begins: evaluations and checkpoints between two steps are not its doing."""
        if not self._said_full:
            self._given_back = self._device.memory_given_back()

    def after(self, step: int, *, step_s: float, steps_left: int) -> None:
        """step: that is complete now, and took `step_s` seconds."""
        if step < self._settled_at:
            return
        if step == self._settled_at and self._reminds:
            self._remind(left_s=step_s * steps_left)
        if not self._said_full:
            self._look_at_memory(step)

    def _remind(self, *, left_s: float) -> None:
        if left_s > LONG_S:
            self._console.note(
                f"about {format_seconds(left_s)} to go, and no checkpoint on the way: an interrupt writes one, a kill "
                'or a power cut loses all of it. train.save_every: "30 min" bounds that'
            )

    def _look_at_memory(self, step: int) -> None:
        times = self._device.memory_given_back() - self._given_back
        self._full_steps = self._full_steps + 1 if times else 0
        if self._full_steps < FULL_STEPS:
            return
        self._said_full = True
        rows = self._plan.micro_batch
        fewer = f", or memory.micro_batch: {rows - 1}" if rows > 1 else ""
        self._console.warn(
            f"step {step}: the device is so full that PyTorch gave memory back and took it anew, {times} times "
            f"in this step, and waits each time. Numbers do not change, the speed does: raise memory.vram if the card "
            f"has more{fewer} (in a new run)"
        )
