"""A run that is ready to train: what `build` constructs, `trainer` drives and `checkpoint` saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from megatrain.host.store import HostStore
from megatrain.model.batch import MicroBatch
from megatrain.model.streamed import StreamedModel
from megatrain.optim.worker import OptimizerWorker
from megatrain.plan.accounting import MemoryPlan
from megatrain.recipe import Recipe
from megatrain.stream.device import Device
from megatrain.stream.executor import StreamingExecutor
from megatrain.train.gate import UnitGate
from megatrain.train.yardstick import Yardstick


class StepRows(Protocol):
    """The rows of one optimizer step."""

    @property
    def tokens(self) -> int:
        """Padding excluded."""

    @property
    def supervised(self) -> int: ...

    def micro_batches(self, rows: int) -> Sequence[MicroBatch]:
        """Cut into passes of at most `rows` rows."""

    def origins(self, rows: int) -> Sequence[Sequence[str]]:
        """The same cut: each pass's rows as "file: row 7"."""


class StepLoader(Protocol):
    """Steps of data in an order that follows from the seed alone."""

    @property
    def even(self) -> bool:
        """Whether every epoch has as many steps."""

    def steps_in_epoch(self, epoch: int) -> int: ...
    def step_batch(self, epoch: int, index: int) -> StepRows: ...


@dataclass(frozen=True)
class Run:
    """The rooms of one run, constructed and connected."""

    recipe: Recipe
    model: StreamedModel
    store: HostStore
    device: Device
    device_name: str  # for people: "NVIDIA H200", "CPU, 2 threads"
    executor: StreamingExecutor
    worker: OptimizerWorker
    gate: UnitGate  # between the worker and the saver
    loader: StepLoader
    eval_batches: Sequence[Sequence[MicroBatch]]  # each group is evaluated in one sweep over the layers; empty: none
    tokenizer: PreTrainedTokenizerBase
    plan: MemoryPlan
    yardstick: Yardstick | None = None  # None: the device's peak is not known
