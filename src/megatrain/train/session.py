"""One process's work on a run: from the recipe to run.json, whatever happens on the way.

Nothing of an earlier run in the folder is touched before the new one has its weights in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.errors import DiskError, MegatrainError, UsageError
from megatrain.plan.disk import SPARE_BYTES
from megatrain.recipe import Recipe
from megatrain.report.console import Console
from megatrain.report.events import RunReport
from megatrain.report.journal import Journal
from megatrain.report.metrics import MetricsLog
from megatrain.report.sinks import open_sinks
from megatrain.train.build import build_run, check_weights
from megatrain.train.checkpoint import (
    Checkpoint,
    give_up_after,
    make_room,
)
from megatrain.train.checkpoint_writer import CheckpointWriter
from megatrain.train.export import export_bytes, export_run
from megatrain.train.failure import error_object, machine_error
from megatrain.train.manifest import Damaged
from megatrain.train.preflight import check_places
from megatrain.train.prospect import Prospect, look_ahead
from megatrain.train.replan import train_through
from megatrain.train.resume import Start, check_same_run, decide
from megatrain.train.room import check_planned_room, check_room
from megatrain.train.run import Run
from megatrain.train.rundir import RunDir
from megatrain.train.signals import Interrupted, StopFlag
from megatrain.train.standing import Standing, finished_before, run_report
from megatrain.train.state import TrainState
from megatrain.train.trainer import Trainer


class Session:
    """Owns the run folder while `run` works."""

    def __init__(self, recipe: Recipe, *, resume: str, console: Console, stop: StopFlag) -> None:
        self.recipe = recipe
        self.rundir = RunDir(Path(recipe.output.dir).expanduser())
        self.owns_folder = False  # what this process reports belongs in the folder
        self.summary: dict[str, Any] = {}  # of a run that ended early: run.json, also where that cannot be written
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
        check_places(self.rundir, recipe=self.recipe, start=start)
        prospect = look_ahead(self.recipe, start=start, console=self._console, stop=self._stop)
        check_planned_room(prospect, rundir=self.rundir, start=start, warn=self._console.warn)
        if not start.candidates:
            check_weights(prospect.planned)
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
            check_places(self.rundir, recipe=self.recipe, start=start)
            self.owns_folder = not (start.candidates or start.replaces)
            with self._failures_reported():
                self._train(start)
            report = self.report("done", exit_code=0)
            self._write_end(report)
            return report

    # -- phases -------------------------------------------------------------------------------------------

    def _train(self, start: Start) -> None:
        prospect = look_ahead(self.recipe, start=start, console=self._console, stop=self._stop)
        needs = check_planned_room(prospect, rundir=self.rundir, start=start, warn=self._console.warn)
        run, state, origin = self._build(prospect, start=start)
        self._run = run
        check_room(needs, run=run, rundir=self.rundir, start=start)
        self._take_folder(start, origin=origin)
        with self._journal(state, start=start, resumed=origin is not None) as journal:
            run = train_through(
                prospect,
                run=run,
                state=state,
                make=partial(self._make_trainer, journal=journal),
                console=self._console,
                stop=self._stop,
            )
        if self.recipe.output.export:
            self._export(run, step=prospect.total_steps)
        run.device.synchronize()
        run.worker.close()
        run.store.close()

    def _export(self, run: Run, *, step: int) -> None:
        self._console.phase(f"exporting to {self.rundir.model}")
        dtype = self.recipe.output.export_dtype
        make_room(
            self.rundir.checkpoints,
            on=self.rundir.path,
            needed=export_bytes(run, dtype=dtype) + SPARE_BYTES,
            what="the exported model",
            step=step,
            warn=self._console.warn,
        )
        export_run(run, out=self.rundir.model, dtype=dtype)

    def _make_trainer(self, prospect: Prospect, run: Run, state: TrainState, *, journal: Journal) -> Trainer:
        self._run = run
        self._trainer = Trainer(
            run,
            state=state,
            total_steps=prospect.total_steps,
            journal=journal,
            checkpoints=CheckpointWriter(
                self.rundir.checkpoints,
                store=run.store,
                identity=prospect.identity,
                keep=self.recipe.output.keep,
                console=self._console,
                stop=self._stop,
                mend_folder=self._mend_folder,
            ),
            stop=self._stop,
        )
        return self._trainer

    def _mend_folder(self) -> None:
        """Whoever resumes from a folder that was removed and made again has to find the recipe in it, too."""
        if not os.path.lexists(self.rundir.recipe):
            self.rundir.path.mkdir(parents=True, exist_ok=True)
            self.rundir.write_recipe(self.recipe.to_yaml())
            self._console.warn(f"{self.rundir.recipe} was removed; it is written again")

    def _build(self, prospect: Prospect, *, start: Start) -> tuple[Run, TrainState, Checkpoint | None]:
        """The run with its weights in memory, and where it stands."""
        if not start.candidates:
            return self._build_run(prospect, load_weights=True), TrainState(), None
        run = self._build_run(prospect, load_weights=False)
        for candidate in start.candidates:
            check_same_run(candidate.manifest.identity, now=prospect.identity)
            try:
                candidate.load_into(run.store, console=self._console, check=self._stop.check)
            except Damaged as error:
                self._console.warn(f"{candidate.path.name} was skipped: {error}")
                continue
            self._stop.kept = str(candidate.path)
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
            stop=self._stop,
        )

    def _take_folder(self, start: Start, *, origin: Checkpoint | None) -> None:
        """From here on the folder is this run's."""
        if start.replaces:
            self.rundir.clear()
        elif start.in_place and origin is not None:  # before metrics.jsonl is cut back: they belong together
            for path in give_up_after(self.rundir.checkpoints, step=origin.state.step):
                self._console.note(f"{path.name} is not gone on with; it goes with the next checkpoint")
        self.rundir.summary.unlink(missing_ok=True)
        with suppress(OSError):  # a word that nothing depends on; after a kill it stays
            self.rundir.write_summary({"status": "running", "exit_code": None})
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

    def _tell(self, start: Start) -> None:
        for warning in start.warnings:
            self._console.warn(warning)
        for note in start.notes:
            self._console.note(note)

    # -- endings ------------------------------------------------------------------------------------------

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Interrupted as interrupt:
            self._stop.handled()
            self._leave("interrupted", interrupt.exit_code)
            raise
        except Exception as error:
            known = error if isinstance(error, MegatrainError) else machine_error(error, folder=self.rundir.path)
            self._leave("error", known.exit_code if known else 1, error=error_object(known or error))
            if known is None or known is error:
                raise
            raise known from error

    def _leave(self, status: str, exit_code: int, *, error: dict[str, Any] | None = None) -> None:
        """Say what is safe, and write run.json if the folder is ours; a disk that refuses it changes nothing."""
        report = self.report(status, exit_code=exit_code, error=error)
        if self._trainer is not None:
            kept = f"; {report.checkpoint} is intact" if report.checkpoint else "; nothing was saved"
            self._console.note(f"stopped after step {report.steps}{kept}")
        if self.owns_folder:
            self.summary = report.to_json()
            try:
                self.rundir.write_summary(self.summary)
            except OSError as trouble:
                self._console.warn(f"cannot write {self.rundir.summary}: {trouble.strerror}")

    def report(self, status: str, *, exit_code: int, error: dict[str, Any] | None = None) -> RunReport:
        """What is known of the run now."""
        trainer, run = self._trainer, self._run
        return run_report(
            Standing(
                state=trainer.state if trainer is not None else TrainState(),
                tokens=trainer.trained_tokens if trainer is not None else 0,
                seconds=trainer.trained_s if trainer is not None else 0.0,
                wall_s=time.monotonic() - self._begin_s,
                vram_peak_bytes=run.device.memory_peak_bytes() if run is not None else 0,
            ),
            rundir=self.rundir,
            exports=self.recipe.output.export,
            status=status,
            exit_code=exit_code,
            error=error,
        )

    def _write_end(self, report: RunReport) -> None:
        """Raises DiskError where run.json cannot be written; then only that is missing."""
        try:
            self.rundir.write_summary(report.to_json())
        except OSError as error:
            self.summary = report.to_json()
            raise DiskError(
                f"cannot be written: {error.strerror}; the run is done, and checkpoint and model are in place",
                where=str(self.rundir.summary),
                hint="once it can be, --resume auto writes it",
            ) from error

    def _finished_before(self) -> RunReport:
        return finished_before(self.rundir, blank=self.report("done", exit_code=0))
