"""Room on the disk: what a run must have is looked for before a byte of weights is read, and before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megatrain.data import Loader
from megatrain.errors import DiskError
from megatrain.host.source import has_weights, locate
from megatrain.plan.accounting import checkpoint_bytes
from megatrain.plan.disk import MANY, DiskNeeds
from megatrain.plan.preflight import disk_shortage, disk_words
from megatrain.recipe import Recipe
from megatrain.train.checkpoint import droppable, state_bytes
from megatrain.train.export import export_bytes
from megatrain.train.intervals import times_due
from megatrain.train.model_config import model_path
from megatrain.train.planning import Planned
from megatrain.train.prospect import Prospect
from megatrain.train.resume import Start
from megatrain.train.run import Run
from megatrain.train.rundir import RunDir
from megatrain.units import format_size


def check_planned_room(prospect: Prospect, *, rundir: RunDir, start: Start, warn: Callable[[str], None]) -> DiskNeeds:
    """What the run will write, told where it is more than is free. Raises DiskError where the run could not end."""
    recipe, planned = prospect.recipe, prospect.planned
    done = start.candidates[0].state.step if start.candidates else 0
    loader = Loader.of(prospect.prepared.train, recipe=recipe)
    saves = times_due(
        recipe.train.save_every,
        after=done,
        total=prospect.total_steps,
        steps_in_epoch=loader.steps_in_epoch,
        most=recipe.output.keep + 1,
    )
    needs = DiskNeeds(
        checkpoint=checkpoint_bytes(planned.model.sizes, moment_bytes=planned.job.moment_bytes),
        export=_planned_export(recipe, planned=planned),
        keep=recipe.output.keep,
        saves=1 if saves is None else saves,
        saves_at_most=MANY if saves is None else saves,
        resumed=start.in_place and bool(start.candidates),
    )
    free = _free(rundir, start=start)
    _refuse(needs, free=free, rundir=rundir)
    short = disk_shortage(needs, free=free)
    if short is not None:
        warn(short)
    return needs


def check_room(needs: DiskNeeds, *, run: Run, rundir: RunDir, start: Start) -> None:
    """The same with the bytes that were allocated and those that the export will have. Raises DiskError."""
    export = export_bytes(run, dtype=run.recipe.output.export_dtype) if needs.export else 0
    exact = replace(needs, checkpoint=state_bytes(run.store), export=export)
    _refuse(exact, free=_free(rundir, start=start), rundir=rundir)


def _free(rundir: RunDir, *, start: Start) -> int:
    """Bytes free for this run: also those of what goes when it begins, or may go."""
    there = next(p for p in (rundir.path, *rundir.path.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free + (_size(rundir.path) if start.replaces else 0)
    if start.in_place and start.candidates:
        free += sum(_size(path) for path in droppable(rundir.checkpoints, step=start.candidates[0].state.step))
    return free


def _refuse(needs: DiskNeeds, *, free: int, rundir: RunDir) -> None:
    if free < needs.least:
        raise DiskError(
            f"{format_size(needs.least)} of disk are needed and {format_size(free)} are free: {disk_words(needs)}",
            where=str(rundir.path),
            hint="make room, or choose another disk with --output-dir",
        )


def _planned_export(recipe: Recipe, *, planned: Planned) -> int:
    """Bytes of the exported model, before anything is read: as large as the source's files where they are here."""
    if not recipe.output.export:
        return 0
    wanted, params = recipe.output.export_dtype, planned.model.sizes.params_total
    folder = Path(model_path(recipe))
    if wanted != "auto":
        return (4 if wanted == "fp32" else 2) * params
    if recipe.model.init == "random":
        return planned.model.spec.precision.itemsize * params
    return locate(folder).nbytes if folder.is_dir() and has_weights(folder) else 2 * params  # not fetched yet


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
