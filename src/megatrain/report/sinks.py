"""Where else the numbers go: TensorBoard event files and Weights & Biases. Both are optional extras."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megatrain.errors import UsageError
from megatrain.files import write_whole
from megatrain.report.events import EvalReport, Event, StepReport


class Sink(Protocol):
    """Takes the numbers of each event. `close` flushes."""

    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...


def scalars(event: Event) -> dict[str, float]:
    """What of an event is a curve, by the name it has in both services."""
    if isinstance(event, StepReport):
        curves = {
            "train/loss": event.loss,
            "train/lr": event.lr,
            "train/grad_norm": event.grad_norm,
            "train/epoch": event.epoch,
            "speed/tokens_per_s": event.tokens_per_s,
            "speed/step_s": event.step_s,
            "speed/exposed_optimizer_s": event.exposed_optimizer_s,
            "speed/exposed_transfer_s": event.exposed_transfer_s,
            "memory/vram_peak_bytes": float(event.vram_peak_bytes),
            "memory/host_peak_bytes": float(event.host_peak_bytes),
        }
        return curves | ({"train/aux_loss": event.aux_loss} if event.aux_loss is not None else {})
    if isinstance(event, EvalReport):
        return {"eval/loss": event.loss, "eval/perplexity": event.perplexity}
    return {}


def check_available(*, tensorboard: bool, wandb: bool) -> None:
    """Before anything is loaded: are the packages of the wanted sinks there? Raises UsageError."""
    for wanted, package, extra in ((tensorboard, "tensorboard", "tensorboard"), (wandb, "wandb", "wandb")):
        if wanted and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"needs the package {package}, which is not installed",
                hint=f"pip install 'megatrain[{extra}]', or leave report.{extra} out",
                where=f"report.{extra}",
            )


class TensorBoardSink:
    """An event file in `folder`, written with TensorBoard's own writer (no torch).

    On resume the first record tells TensorBoard to drop the steps after `resumed_step`, as metrics.jsonl does.
    """

    def __init__(self, folder: Path, *, resumed_step: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_pb2: Any = event_pb2
        self._summary_pb2: Any = summary_pb2
        self._writer: Any = EventFileWriter(str(folder))
        if resumed_step is not None:
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(step=resumed_step + 1, session_log=session))

    def write(self, event: Event) -> None:
        values = [self._summary_pb2.Summary.Value(tag=tag, simple_value=x) for tag, x in scalars(event).items()]
        if values:
            summary = self._summary_pb2.Summary(value=values)
            self._writer.add_event(self._event_pb2.Event(wall_time=event.time, step=event.step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of a Weights & Biases project; its id is kept in the run folder, so that a resume continues it."""

    def __init__(self, folder: Path, *, project: str, config: dict[str, Any], resumed_step: int | None) -> None:
        import wandb

        id_file = folder / "wandb-id"
        if resumed_step is None or not id_file.is_file():
            write_whole(id_file, secrets.token_hex(4).encode())
        self._run: Any = wandb.init(
            project=project, id=id_file.read_text().strip(), resume="allow", dir=str(folder), config=config
        )

    def write(self, event: Event) -> None:
        curves = scalars(event)
        if curves:
            self._run.log(curves, step=event.step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(
    folder: Path, *, tensorboard: bool, wandb: str | None, config: dict[str, Any], resumed_step: int | None
) -> Sequence[Sink]:
    """The sinks that the recipe's report section asks for."""
    sinks: list[Sink] = []
    if tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", resumed_step=resumed_step))
    if wandb is not None:
        sinks.append(WandbSink(folder, project=wandb, config=config, resumed_step=resumed_step))
    return sinks
