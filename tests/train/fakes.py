"""A run without a model: the real store, optimizer, checkpoints and journal around a device that is a few lines.

Its "loss" and "gradients" follow from the weights' bits, the rows and the step's seed, so a run that forgets
any of them somewhere ends in other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from megatrain.host.store import HostStore, HostUnit
from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.layout import FlatLayout, TensorSpec
from megatrain.optim.adamw import AdamW
from megatrain.optim.worker import OptimizerWorker, UnitGradient
from megatrain.recipe import Recipe, recipe_from_dict
from megatrain.report.console import Console
from megatrain.report.events import EvalReport, SaveReport, SkipReport, StepReport
from megatrain.report.journal import Journal
from megatrain.report.metrics import MetricsLog, read_metrics
from megatrain.stream.device import CpuDevice
from megatrain.stream.resident import ResidentUnits
from megatrain.stream.step import StepParts
from megatrain.train.checkpoint_writer import CheckpointWriter
from megatrain.train.gate import UnitGate
from megatrain.train.intervals import total_steps
from megatrain.train.manifest import Identity
from megatrain.train.run import Run
from megatrain.train.rundir import RunDir
from megatrain.train.signals import StopFlag
from megatrain.train.state import TrainState
from megatrain.train.trainer import Trainer

STEPS_IN_EPOCH = (5, 4, 5)  # by epoch; it repeats


def tiny_anatomy(*, dtype: torch.dtype = torch.bfloat16) -> Anatomy:
    def unit(index: int, name: str, *specs: TensorSpec) -> Unit:
        return Unit(index, name, FlatLayout.of(specs), {s.name: (f"{name}.{s.name}",) for s in specs}, frozenset())

    def layer(index: int) -> Unit:
        weight = TensorSpec("weight", (8, 6), dtype, True)
        norm = TensorSpec("norm", (8,), torch.float32, True)
        buffer = TensorSpec("steps", (3,), torch.int64, False)
        return unit(index, f"layer {index - 1}", weight, norm, buffer)

    stem = unit(0, "stem", TensorSpec("embed", (16, 8), dtype, True))
    tail = unit(3, "tail", TensorSpec("head", (16, 8), dtype, True))
    return Anatomy(stem, (layer(1), layer(2)), tail, kinds=(0, 0), stem_in_tail=False, stem_in_layers=False)


def tiny_store(*, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> HostStore:
    store = HostStore.allocate(tiny_anatomy(dtype=dtype), pin=False, threads=1)
    generator = torch.Generator().manual_seed(seed)
    for unit in store.units:
        for entry in unit.unit.layout.params:
            unit.set_master(entry, torch.randn(entry.shape, generator=generator))
    return store


def bits(store: HostStore) -> list[bytes]:
    """Everything that a resume must bring back."""
    tensors = [t for u in store.units for t in (u.hi, u.lo, u.exp_avg, u.exp_avg_sq, u.steps)]
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


@dataclass(frozen=True)
class FakeRows:
    epoch: int
    index: int
    tokens: int = 24
    supervised: int = 10

    def micro_batches(self, rows: int) -> Sequence[Any]:
        return (self,)

    def origins(self, rows: int) -> Sequence[Sequence[str]]:
        return ((f"rows.jsonl: row {10 * self.epoch + self.index + 1}",),)


class FakeLoader:
    even = False

    def steps_in_epoch(self, epoch: int) -> int:
        return STEPS_IN_EPOCH[epoch % len(STEPS_IN_EPOCH)]

    def step_batch(self, epoch: int, index: int) -> FakeRows:
        assert 0 <= index < self.steps_in_epoch(epoch)
        return FakeRows(epoch, index)


@dataclass(frozen=True)
class FakeNumbers:
    loss: float
    grad_norm: float
    aux_loss: float | None = None
    exposed_transfer_s: float = 0.0
    exposed_optimizer_s: float = 0.0

    @property
    def finite(self) -> bool:
        return self.loss - self.loss == 0.0 and self.grad_norm - self.grad_norm == 0.0


@dataclass(frozen=True)
class FakeOutput:
    gradients: tuple[UnitGradient, ...]
    result: Callable[[], FakeNumbers]
    parts: Callable[[], StepParts]


@dataclass
class FakeExecutor:
    """`spoil` maps a call number (from 1) to the numbers that it returns; `on_step` is called at each step."""

    store: HostStore
    worker: OptimizerWorker
    spoil: dict[int, FakeNumbers] = field(default_factory=dict)
    on_step: Callable[[int], None] = lambda call: None
    on_evaluate: Callable[[], None] = lambda: None
    calls: int = 0
    homecomings: int = 0
    unit_norms: dict[int, float] = field(default_factory=dict)  # what `parts` says of these units
    rows: list[tuple[int, int]] = field(default_factory=list)
    resident: ResidentUnits | None = None  # units that live "on the device"

    def there(self) -> list[HostUnit]:
        """Every unit where it lives."""
        away = self.resident.units if self.resident is not None else {}
        return [away.get(unit.unit.index, unit) for unit in self.store.units]

    def train_step(self, batches: Sequence[Any], *, seed: int) -> FakeOutput:
        self.calls += 1
        self.on_step(self.calls)
        self.rows += [(b.epoch, b.index) for b in batches]
        if self.resident is not None:
            self.resident.load()
        total = torch.zeros((), dtype=torch.float64)
        for unit in self.there():
            self.worker.wait_updated(unit.unit.index)
            for entry in unit.unit.layout.params:
                total += unit.streamed(entry).double().square().sum()
        generator = torch.Generator().manual_seed(seed + 1000 * batches[0].epoch + batches[0].index)
        for unit in self.there():
            for gradient in unit.unit.layout.param_views(unit.grad).values():
                gradient.copy_(torch.randn(gradient.shape, generator=generator) * float(total).__abs__() ** 0.5)
        numbers = self.spoil.get(self.calls, FakeNumbers(float(total), float(total) ** 0.5))
        gradients = tuple(
            UnitGradient(
                u.unit.index, lambda: None, None, resident=None if any(u is unit for unit in self.store.units) else u
            )
            for u in self.there()
        )
        norms = dict.fromkeys(range(len(self.store.units)), numbers.grad_norm) | self.unit_norms
        return FakeOutput(gradients, lambda: numbers, lambda: StepParts((numbers.loss,), norms))

    def bring_home(self) -> None:
        self.homecomings += 1
        if self.resident is not None:
            self.resident.bring_home()

    def evaluate(self, batches: Sequence[Any]) -> tuple[float, int]:
        self.on_evaluate()
        self.worker.drain()
        weights = self.store.tail.streamed(self.store.tail.unit.layout.params[0])
        return float(weights.double().square().sum()), 7 * len(batches)


class RecordingConsole:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.events: list[StepReport | SkipReport | EvalReport | SaveReport] = []

    def phase(self, text: str) -> None:
        self.told.append(text)

    def progress(self, text: str, *, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.told.append(text)

    def warn(self, text: str) -> None:
        self.told.append(f"warning: {text}")

    def begin(self, *, first_step: int, total_steps: int) -> None:
        self.told.append(f"from {first_step} to {total_steps}")

    def step(self, report: StepReport) -> None:
        self.events.append(report)

    skipped = evaluated = saved = step

    def close(self) -> None:
        pass


def tiny_recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    values: dict[str, Any] = {
        "model": {"path": "nowhere/model"},
        "data": {"train": "rows.jsonl", "eval": "held.jsonl"},
        "output": {"dir": str(folder)},
    }
    return recipe_from_dict(values | sections)


IDENTITY = Identity(
    recipe={}, plan={}, precision="bf16", config_hash="c", data="d", total_steps=0, versions={"python": "3"}
)


@dataclass
class Stage:
    """One process's worth of a run, set up in `folder`."""

    folder: Path
    recipe: Recipe
    store: HostStore
    worker: OptimizerWorker
    executor: FakeExecutor
    console: RecordingConsole
    stop: StopFlag
    trainer: Trainer
    journal: Journal

    def train(self) -> None:
        """Also closes what a process's end would close."""
        try:
            self.trainer.train()
        finally:
            self.worker.close()
            self.journal.close()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    def curve(self, kind: str, *keys: str) -> list[tuple[Any, ...]]:
        return [tuple(line[key] for key in keys) for line in self.lines if line["kind"] == kind]


def stage(
    folder: Path,
    *,
    state: TrainState | None = None,
    store: HostStore | None = None,
    eval_groups: int = 0,
    retry_waits_s: Sequence[float] = (),
    resident: int = 0,
    **train: Any,
) -> Stage:
    """A run in `folder` with the recipe's train section (and `optimizer`, `output`) as given."""
    sections = {name: train.pop(name) for name in ("optimizer", "output") if name in train}
    sections["output"] = {"dir": str(folder)} | sections.get("output", {})
    recipe = tiny_recipe(folder, train=train, **sections)
    rundir = RunDir(folder)
    folder.mkdir(parents=True, exist_ok=True)
    store = store or tiny_store()
    optimizer = AdamW(
        store,
        betas=recipe.optimizer.betas,
        eps=recipe.optimizer.eps,
        weight_decay=0.1,
        decay_all=False,
        never_decay=frozenset(),
        kernel=None,
    )
    gate, console, stop = UnitGate(), RecordingConsole(), StopFlag()
    worker = OptimizerWorker(optimizer, store=store, before_unit=gate.before, after_unit=gate.after)
    executor = FakeExecutor(store, worker)
    if resident:
        executor.resident = ResidentUnits(store, device=CpuDevice(), count=resident)
    run = cast(
        Run,
        SimpleNamespace(
            recipe=recipe,
            store=store,
            worker=worker,
            gate=gate,
            executor=executor,
            loader=FakeLoader(),
            eval_batches=[[None, None]] * eval_groups,
            plan=SimpleNamespace(micro_batch=2),
            yardstick=None,
            device=SimpleNamespace(memory_peak_bytes=lambda: 0, memory_given_back=lambda: 0),
        ),
    )
    metrics = MetricsLog(rundir.metrics, warn=console.warn)
    if state is not None:
        metrics.cut_back(step=state.step, eval_step=state.eval_step)
    journal = Journal(console=cast(Console, console), metrics=metrics, sinks=())
    checkpoints = CheckpointWriter(
        rundir.checkpoints,
        store=store,
        identity=IDENTITY,
        keep=recipe.output.keep,
        console=cast(Console, console),
        stop=stop,
        retry_waits_s=retry_waits_s,
    )
    total = total_steps(FakeLoader(), epochs=recipe.train.epochs, steps=recipe.train.steps)
    trainer = Trainer(
        run,
        state=state or TrainState(),
        total_steps=total,
        journal=journal,
        checkpoints=checkpoints,
        stop=stop,
    )
    return Stage(folder, recipe, store, worker, executor, console, stop, trainer, journal)
