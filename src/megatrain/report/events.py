"""What a run tells, as values: one dataclass per thing that can be reported, units in the names.

Each becomes one line of metrics.jsonl (``record``), one line of the console, and points in the sinks.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import ClassVar

from megatrain.report.bound import bound_by


@dataclass(frozen=True)
class StepReport:
    """One optimizer step that was taken."""

    kind: ClassVar[str] = "train"

    step: int
    epoch: float  # epochs of data used up, this step included
    time: float  # unix seconds
    loss: float  # mean cross-entropy over the supervised tokens of the step
    aux_loss: float | None
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # padding excluded
    supervised_tokens: int
    step_s: float
    tokens_per_s: float
    optimizer_s: float  # the CPU's last complete update; it overlaps the next forward
    exposed_optimizer_s: float  # of step_s: waiting for updated weights
    exposed_transfer_s: float  # of step_s: waiting for the link
    vram_peak_bytes: int
    host_peak_bytes: int
    loss_spike: float | None = None  # the threshold that the loss exceeds, if it does (train/spikes.py)
    limit_share: float | None = None  # the machine's limit for this step over step_s; None where it is not known

    @property
    def bound_by(self) -> str:
        """The resource that the step spent most of its time under."""
        return bound_by(
            step_s=self.step_s,
            optimizer_s=self.optimizer_s,
            exposed_optimizer_s=self.exposed_optimizer_s,
            exposed_transfer_s=self.exposed_transfer_s,
        )

    @property
    def compute_share(self) -> float:
        """Share of the step in which the device did not wait for weights, 0 to 1."""
        if self.step_s <= 0:
            return 1.0
        return max(0.0, 1 - (self.exposed_optimizer_s + self.exposed_transfer_s) / self.step_s)


@dataclass(frozen=True)
class SkipReport:
    """A step whose loss or gradient norm was not finite: its data is used up, no weight was touched."""

    kind: ClassVar[str] = "skip"

    step: int
    epoch: float
    time: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    supervised_tokens: int
    reason: str
    rows: tuple[str, ...]  # "file: row 7", of the micro-batches whose loss is not finite, else of the step
    layers: tuple[str, ...]  # whose gradient is not finite, in the order of the backward


@dataclass(frozen=True)
class EvalReport:
    """A pass over the evaluation rows with the weights after `step` steps."""

    kind: ClassVar[str] = "eval"

    step: int
    epoch: float
    time: float
    loss: float
    supervised_tokens: int
    eval_s: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class SaveReport:
    """A checkpoint that is complete on disk."""

    kind: ClassVar[str] = "save"

    step: int
    epoch: float
    time: float
    path: str
    bytes: int
    save_s: float  # from taking hold of the state to the last byte on the disk
    stall_s: float  # of it: the optimizer or the trainer waited for the saver
    weights_sha256: str | None  # of the master weights: equal in two runs whose weights are


Event = StepReport | SkipReport | EvalReport | SaveReport


def record(event: Event) -> dict[str, object]:
    """The event as a JSON object. JSON has no NaN or infinity: such numbers become null."""
    fields = {"kind": event.kind} | dataclasses.asdict(event)
    if isinstance(event, EvalReport):
        fields["perplexity"] = event.perplexity
    return {key: finite_or_none(value) for key, value in fields.items()}


def finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class RunReport:
    """The run in one object: run.json, and what ``--json`` prints."""

    status: str  # "done" | "interrupted" | "error"
    exit_code: int
    steps: int
    epochs: float
    tokens: int
    tokens_here: int  # of `tokens`, what this process trained on
    supervised_tokens: int
    first_loss: float | None
    last_loss: float | None
    first_eval_loss: float | None
    eval_loss: float | None
    skipped_steps: int
    tokens_per_s: float | None  # of this process, over its training steps
    wall_s: float  # of this process
    vram_peak_bytes: int
    host_peak_bytes: int
    checkpoint: str | None
    weights_sha256: str | None  # of the checkpoint's master weights: equal in two runs whose weights are
    model: str | None
    versions: dict[str, str]
    error: dict[str, object] | None = field(default=None)

    def to_json(self) -> dict[str, object]:
        fields = {key: finite_or_none(value) for key, value in dataclasses.asdict(self).items()}
        if fields["error"] is None:
            del fields["error"]
        return fields
