"""What run.json says: where a run stands when its process ends, and what an earlier process said of itself."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatrain.report.events import RunReport
from megatrain.report.process import host_peak_bytes, versions
from megatrain.train.checkpoint import newest_checkpoint, weights_digest
from megatrain.train.rundir import RunDir
from megatrain.train.state import TrainState


@dataclass(frozen=True)
class Standing:
    """Of this process: how far it came."""

    state: TrainState
    tokens: int  # that it trained on, padding excluded
    seconds: float  # in steps
    wall_s: float  # since it began
    vram_peak_bytes: int


def run_report(
    standing: Standing,
    *,
    rundir: RunDir,
    exports: bool,
    status: str,
    exit_code: int,
    error: dict[str, Any] | None,
) -> RunReport:
    """exports: whether the recipe asks for a model. error: its words, if one ended the run."""
    state, newest = standing.state, newest_checkpoint(rundir.checkpoints)
    return RunReport(
        status=status,
        exit_code=exit_code,
        steps=state.step,
        epochs=round(state.epochs, 6),
        tokens=state.tokens,
        tokens_here=standing.tokens,
        supervised_tokens=state.supervised_tokens,
        first_loss=state.first_loss,
        last_loss=state.last_loss,
        first_eval_loss=state.first_eval_loss,
        eval_loss=state.eval_loss,
        skipped_steps=state.skipped_steps,
        tokens_per_s=standing.tokens / standing.seconds if standing.seconds else None,
        wall_s=standing.wall_s,
        vram_peak_bytes=standing.vram_peak_bytes,
        host_peak_bytes=host_peak_bytes(),
        checkpoint=str(newest) if newest is not None else None,
        weights_sha256=weights_digest(newest) if newest is not None else None,
        model=str(rundir.model) if status == "done" and exports else None,
        versions=versions(),
        error=error,
    )


def finished_before(rundir: RunDir, *, blank: RunReport) -> RunReport:
    """What the finished run said of itself; `blank` where it said nothing."""
    known = {field.name for field in dataclasses.fields(RunReport)}
    summary = {key: value for key, value in rundir.read_summary().items() if key in known}
    return RunReport(**{**dataclasses.asdict(blank), **summary})
