"""One process's work on a run: from the recipe to run.json, whatever happens on the way.

Nothing of an earlier run in the folder is touched before the new one has its weights in memory.
"""

from __future__ import annotations

import dataclasses
import errno
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatrain.data import Loader, Prepared, load_tokenizer, prepare
from megatrain.errors import DiskError, DoesNotFit, MegatrainError, UsageError
from megatrain.optim.lr import warmup_steps
from megatrain.plan.accounting import MemoryPlan
from megatrain.recipe import Recipe
from megatrain.report.console import Console
from megatrain.report.events import RunReport
from megatrain.report.journal import Journal
from megatrain.report.metrics import MetricsLog
from megatrain.report.process import host_peak_bytes, versions
from megatrain.report.sinks import check_available, open_sinks
from megatrain.train.build import Planned, build_run, max_positions, plan_run, read_config
from megatrain.train.checkpoint import Checkpoint, CheckpointWriter, newest_checkpoint, state_bytes
from megatrain.train.export import export_bytes, export_run
from megatrain.train.intervals import total_steps
from megatrain.train.manifest import Damaged, Identity
from megatrain.train.resume import Start, check_same_run, decide
from megatrain.train.run import Run
from megatrain.train.rundir import RunDir
from megatrain.train.signals import Interrupted, StopFlag
from megatrain.train.state import TrainState
from megatrain.train.trainer import Trainer
from megatrain.units import format_size

_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Prospect:
    """Everything that is known before the first byte of weights."""

    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    planned: Planned
    total_steps: int


class Session:
    """Owns the run folder while `run` works."""

    def __init__(self, recipe: Recipe, *, resume: str, console: Console, stop: StopFlag) -> None:
        self.recipe = recipe
        self.rundir = RunDir(Path(recipe.output.dir).expanduser())
        self.owns_folder = False  # what this process reports belongs in the folder
        self._resume, self._console, self._stop = resume, console, stop
        self._begin_s = time.monotonic()
        self._trainer: Trainer | None = None
        self._run: Run | None = None

    # -- the two things it can do -------------------------------------------------------------------------

    def dry_run(self) -> dict[str, Any]:
        """Everything up to the first byte of weights, writing nothing. Raises what `run` would."""
        self.rundir.check_unlocked()
        start = decide(self.rundir, resume=self._resume, recipe=self.recipe)
        self._tell(start)
        if start.finished:
            return {"status": "dry-run", "exit_code": 0, "finished": True}
        prospect = self._look_ahead(start)
        plan = prospect.planned.plan
        return {
            "status": "dry-run",
            "exit_code": 0,
            "steps": prospect.total_steps,
            "resume": str(start.candidates[0].path) if start.candidates else None,
            "device": prospect.planned.device_name,
            "plan": plan.to_dict(),
            "data": prospect.prepared.report.to_dict(),
        }

    def run(self) -> RunReport:
        """Train to the end. A failure or an interrupt is written to run.json and raised again."""
        with self.rundir.locked():
            start = decide(self.rundir, resume=self._resume, recipe=self.recipe)
            self._tell(start)
            if start.finished:
                return self._finished_before()
            self.owns_folder = not (start.candidates or start.replaces)
            with self._failures_reported():
                self._train(start)
            report = self.report("done", exit_code=0)
            self.rundir.write_summary(report.to_json())
            return report

    # -- phases -------------------------------------------------------------------------------------------

    def _train(self, start: Start) -> None:
        prospect = self._look_ahead(start)
        run, state, origin = self._build(prospect, start=start)
        self._run = run
        self._check_disk(run, start=start, left=prospect.total_steps - state.step)
        self._take_folder(start)
        with self._journal(state, start=start, resumed=origin is not None) as journal:
            identity = self._identity(prospect)
            self._trainer = Trainer(
                run,
                state=state,
                total_steps=prospect.total_steps,
                journal=journal,
                checkpoints=CheckpointWriter(
                    self.rundir.checkpoints,
                    store=run.store,
                    identity=identity,
                    keep=self.recipe.output.keep,
                    console=self._console,
                    stop=self._stop,
                ),
                stop=self._stop,
            )
            self._trainer.train()
        if self.recipe.output.export:
            self._console.phase(f"exporting to {self.rundir.model}")
            export_run(run, out=self.rundir.model, dtype=self.recipe.output.export_dtype)
        run.device.synchronize()
        run.worker.close()
        run.store.close()

    def _look_ahead(self, start: Start) -> Prospect:
        """Data, model structure, plan: all that can fail without having cost much."""
        recipe = self.recipe
        check_available(tensorboard=recipe.report.tensorboard, wandb=recipe.report.wandb is not None)
        config = read_config(recipe)
        self._console.phase("reading and tokenising the data")
        tokenizer = load_tokenizer(recipe)
        prepared = prepare(
            recipe, tokenizer=tokenizer, max_positions=max_positions(config), should_stop=self._stop.check
        )
        for warning in prepared.report.warnings():
            self._console.warn(warning)
        steps = self._count_steps(prepared)
        self._stop.check()
        self._console.phase("reading the model's structure and planning memory")
        planned = self._plan(config, start=start)
        self._stop.check()
        self._describe(planned, prepared=prepared, steps=steps, start=start)
        return Prospect(tokenizer, prepared, planned, steps)

    def _plan(self, config: Any, *, start: Start) -> Planned:
        """A resumed run keeps its precision, and its plan where that still holds: another cut rounds differently."""
        if not start.candidates:
            return plan_run(self.recipe, config=config)
        identity = start.candidates[0].manifest.identity
        recipe = self.recipe
        if recipe.train.precision == "auto":
            train = recipe.train.model_copy(update={"precision": identity.precision})
            recipe = recipe.model_copy(update={"train": train})
        planned = plan_run(recipe, config=config)
        before, now = MemoryPlan.from_dict(identity.plan), planned.plan
        if identity.recipe["memory"] == self.recipe.to_dict()["memory"] and _still_fits(before, now=now):
            return dataclasses.replace(planned, plan=dataclasses.replace(before, threads=now.threads))
        if before.micro_batch != now.micro_batch:
            self._console.note(
                f"the memory plan is new: micro-batches of {now.micro_batch} rows (were {before.micro_batch}), "
                "so sums round differently than before"
            )
        return planned

    def _build(self, prospect: Prospect, *, start: Start) -> tuple[Run, TrainState, Checkpoint | None]:
        """The run with its weights in memory, and where it stands."""
        if not start.candidates:
            return self._build_run(prospect, load_weights=True), TrainState(), None
        run = self._build_run(prospect, load_weights=False)
        for candidate in start.candidates:
            check_same_run(candidate.manifest.identity, now=self._identity(prospect))
            try:
                candidate.load_into(run.store, console=self._console, check=self._stop.check)
            except Damaged as error:
                self._console.warn(f"{candidate.path.name} was skipped: {error}")
                continue
            return run, candidate.state, candidate
        run.worker.close()
        run.store.close()
        if self._resume != "auto":
            raise UsageError(f"no checkpoint of {self._resume} can be read", where="--resume")
        self._console.warn("no checkpoint can be read; starting afresh")
        return self._build_run(prospect, load_weights=True), TrainState(), None

    def _build_run(self, prospect: Prospect, *, load_weights: bool) -> Run:
        self._console.phase("taking memory" + (" and reading weights" if load_weights else ""))
        return build_run(
            prospect.planned,
            prepared=prospect.prepared,
            tokenizer=prospect.tokenizer,
            progress=lambda done, total: self._console.progress("reading weights", done=done, total=total),
            load_weights=load_weights,
        )

    def _take_folder(self, start: Start) -> None:
        """From here on the folder is this run's."""
        if start.replaces:
            self.rundir.clear()
        self.rundir.summary.unlink(missing_ok=True)
        self.rundir.crash.unlink(missing_ok=True)
        self.rundir.write_recipe(self.recipe.to_yaml())
        self.owns_folder = True

    @contextmanager
    def _journal(self, state: TrainState, *, start: Start, resumed: bool) -> Iterator[Journal]:
        metrics = MetricsLog(self.rundir.metrics, warn=self._console.warn)
        metrics.cut_back(step=state.step if resumed else -1, eval_step=state.eval_step)
        sinks = open_sinks(
            self.rundir.path,
            tensorboard=self.recipe.report.tensorboard,
            wandb=self.recipe.report.wandb,
            config=self.recipe.to_dict(),
            resumed_step=state.step if resumed and start.in_place else None,
        )
        journal = Journal(console=self._console, metrics=metrics, sinks=sinks)
        try:
            yield journal
        finally:
            journal.close()

    # -- checks and words ---------------------------------------------------------------------------------

    def _count_steps(self, prepared: Prepared) -> int:
        recipe = self.recipe
        loader = Loader(
            prepared.train,
            batch_size=recipe.train.batch_size,
            max_seq_len=recipe.data.max_seq_len,
            packing=recipe.data.packing,
            shuffle=recipe.data.shuffle,
            seed=recipe.train.seed,
        )
        steps = total_steps(loader, epochs=recipe.train.epochs, steps=recipe.train.steps)
        warmup_steps(recipe.optimizer.warmup, total=steps)  # a warm-up longer than the run is refused here
        return steps

    def _check_disk(self, run: Run, *, start: Start, left: int) -> None:
        """Room for one checkpoint and the export, before the first step."""
        one = state_bytes(run.store) if left > 0 else 0
        export = export_bytes(run, dtype=self.recipe.output.export_dtype) if self.recipe.output.export else 0
        free = shutil.disk_usage(self.rundir.path).free + (_size(self.rundir.path) if start.replaces else 0)
        if free < one + export:
            raise DiskError(
                f"a checkpoint ({format_size(one)}) and the exported model ({format_size(export)}) are to be written, "
                f"and {format_size(free)} are free",
                where=str(self.rundir.path),
                hint="make room, or choose another disk with --output-dir",
            )
        many = (self.recipe.output.keep + 1) * one + export
        if self.recipe.train.save_every is not None and free < many:
            self._console.warn(
                f"output.keep={self.recipe.output.keep} takes up to {format_size(many)} of disk, "
                f"and {format_size(free)} are free"
            )

    def _identity(self, prospect: Prospect) -> Identity:
        planned = prospect.planned
        return Identity(
            recipe=self.recipe.to_dict(),
            plan=planned.plan.to_dict(),
            precision=_PRECISIONS[planned.model.spec.precision],
            config_hash=planned.model.sizes.config_hash,
            data=prospect.prepared.fingerprint(),
            total_steps=prospect.total_steps,
            versions=versions(),
        )

    def _tell(self, start: Start) -> None:
        for warning in start.warnings:
            self._console.warn(warning)
        for note in start.notes:
            self._console.note(note)

    def _describe(self, planned: Planned, *, prepared: Prepared, steps: int, start: Start) -> None:
        plan, train = planned.plan, prepared.train
        self._console.note(
            f"{len(train):,} documents, {train.token_count:,} tokens ({train.supervised_count:,} supervised), "
            f"{steps} steps of {self.recipe.train.batch_size} sequences"
        )
        self._console.note(
            f"{planned.device_name}: micro-batches of {plan.micro_batch}, {plan.slots} weight slots, "
            f"activations on the {plan.activations}, {plan.threads} optimizer threads, "
            f"{format_size(plan.host_total)} of host memory"
            + (f", {format_size(plan.device_total)} of VRAM" if not plan.on_cpu else "")
        )
        if start.candidates and start.candidates[0].manifest.identity.total_steps != steps:
            before = start.candidates[0].manifest.identity.total_steps
            self._console.note(f"the run now has {steps} steps (was {before}); the learning rate follows the new total")

    # -- endings ------------------------------------------------------------------------------------------

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except MegatrainError as error:
            self._leave("error", error.exit_code, error=_error(error))
            raise
        except (torch.OutOfMemoryError, MemoryError, OSError) as error:
            mine = _of_the_machine(error)
            if mine is None:
                self._leave("error", 1, error=_internal(error))
                raise
            self._leave("error", mine.exit_code, error=_error(mine))
            raise mine from error
        except Interrupted as interrupt:
            self._leave("interrupted", interrupt.exit_code)
            raise
        except Exception as error:
            self._leave("error", 1, error=_internal(error))
            raise

    def _leave(self, status: str, exit_code: int, *, error: dict[str, Any] | None = None) -> None:
        """Say what is safe, and write run.json if the folder is ours; a disk that refuses it changes nothing."""
        report = self.report(status, exit_code=exit_code, error=error)
        if self._trainer is not None:
            kept = f"; {report.checkpoint} is intact" if report.checkpoint else "; nothing was saved"
            self._console.note(f"stopped after step {report.steps}{kept}")
        if self.owns_folder:
            try:
                self.rundir.write_summary(report.to_json())
            except OSError as trouble:
                self._console.warn(f"cannot write {self.rundir.summary}: {trouble.strerror}")

    def report(self, status: str, *, exit_code: int, error: dict[str, Any] | None = None) -> RunReport:
        """What is known of the run now."""
        trainer, run = self._trainer, self._run
        state = trainer.state if trainer is not None else TrainState()
        newest = newest_checkpoint(self.rundir.checkpoints)
        return RunReport(
            status=status,
            exit_code=exit_code,
            steps=state.step,
            epochs=round(state.epochs, 6),
            tokens=state.tokens,
            supervised_tokens=state.supervised_tokens,
            first_loss=state.first_loss,
            last_loss=state.last_loss,
            first_eval_loss=state.first_eval_loss,
            eval_loss=state.eval_loss,
            skipped_steps=state.skipped_steps,
            tokens_per_s=trainer.trained_tokens / trainer.trained_s if trainer and trainer.trained_s else None,
            wall_s=time.monotonic() - self._begin_s,
            vram_peak_bytes=run.device.memory_peak_bytes() if run is not None else 0,
            host_peak_bytes=host_peak_bytes(),
            checkpoint=str(newest) if newest is not None else None,
            model=str(self.rundir.model) if status == "done" and self.recipe.output.export else None,
            versions=versions(),
            error=error,
        )

    def _finished_before(self) -> RunReport:
        """What the finished run said of itself."""
        known = {field.name for field in dataclasses.fields(RunReport)}
        summary = {key: value for key, value in self.rundir.read_summary().items() if key in known}
        blank = dataclasses.asdict(self.report("done", exit_code=0))
        return RunReport(**{**blank, **summary})


def _still_fits(plan: MemoryPlan, *, now: MemoryPlan) -> bool:
    """Whether an earlier plan holds under the limits of a new one, on the same kind of device."""
    on_device = now.device_limit is None or plan.device_total <= now.device_limit.bytes
    return plan.on_cpu == now.on_cpu and on_device and plan.host_total <= now.host_limit.bytes


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _of_the_machine(error: Exception) -> MegatrainError | None:
    """What the machine lacks, if that is what the error says."""
    match error:
        case torch.OutOfMemoryError():
            return DoesNotFit(
                f"the device ran out of memory: {str(error).splitlines()[0]}",
                hint="lower memory.micro_batch, or set memory.vram below what is really free",
            )
        case MemoryError():
            return DoesNotFit("host memory is exhausted", hint="lower memory.micro_batch, or set memory.host")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EROFS | errno.EIO):
            return DiskError(error.strerror or str(error), where=str(error.filename or "output.dir"))
    return None


def _internal(error: Exception) -> dict[str, Any]:
    return {"kind": "internal", "message": f"{type(error).__name__}: {error}", "hint": None, "where": None}


def _error(error: MegatrainError) -> dict[str, Any]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint, "where": error.where}
