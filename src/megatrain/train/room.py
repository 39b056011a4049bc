"""Room on the disk: what a run must have is looked for before a byte of weights is read, and before the first step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.data import Loader
from megatrain.errors import DiskError
from megatrain.host.source import has_weights, locate
from megatrain.plan.accounting import checkpoint_bytes
from megatrain.plan.disk import MANY, DiskNeeds
from megatrain.plan.preflight import disk_shortage, disk_words
from megatrain.recipe import Recipe
from megatrain.train.checkpoint import droppable, given_up, state_bytes, steps
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
    for volume in _volumes(needs, rundir=rundir, start=start):
        volume.refuse_if_short()
        short = disk_shortage(volume.needs, free=volume.free)
        if short is not None:
            warn(short)
    return needs


def check_room(needs: DiskNeeds, *, run: Run, rundir: RunDir, start: Start) -> None:
    """The same with the bytes that were allocated and those that the export will have. Raises DiskError."""
    export = export_bytes(run, dtype=run.recipe.output.export_dtype) if needs.export else 0
    exact = replace(needs, checkpoint=state_bytes(run.store), export=export)
    for volume in _volumes(exact, rundir=rundir, start=start):
        volume.refuse_if_short()


@dataclass(frozen=True)
class _Volume:
    """A disk that the run writes to. free: in bytes, with what goes when the run begins, or may go."""

    needs: DiskNeeds
    free: int
    where: Path

    def refuse_if_short(self) -> None:
        """Raises DiskError."""
        if self.free < self.needs.least:
            raise DiskError(
                f"{format_size(self.needs.least)} of disk are needed and {format_size(self.free)} are free: "
                f"{disk_words(self.needs)}",
                where=str(self.where),
                hint="make room, or choose another disk with --output-dir",
            )


def _volumes(needs: DiskNeeds, *, rundir: RunDir, start: Start) -> list[_Volume]:
    """One; two where checkpoints are a link or a mount that leads to another disk than the rest of the folder."""
    here, there = _nearest(rundir.path), _nearest(rundir.checkpoints)
    free, checkpoints, rest = shutil.disk_usage(here).free, _freed_checkpoints(rundir, start=start), 0
    if start.replaces:
        rest = sum(_size(p) for p in (rundir.model, rundir.path / "tensorboard") if not p.is_symlink())
    if here.stat().st_dev == there.stat().st_dev:
        return [_Volume(needs, free + checkpoints + rest, rundir.path)]
    return [
        _Volume(needs.of_checkpoints, shutil.disk_usage(there).free + checkpoints, there.resolve()),
        _Volume(needs.of_export, free + rest, rundir.path),
    ]


def _nearest(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _freed_checkpoints(rundir: RunDir, *, start: Start) -> int:
    folder = rundir.checkpoints
    if start.replaces:
        return sum(_size(path) for path in (*steps(folder), *given_up(folder)))
    if start.in_place and start.candidates:
        return sum(_size(path) for path in droppable(folder, step=start.candidates[0].state.step))
    return 0


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
