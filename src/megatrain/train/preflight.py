"""What stands in a run's folder in the way of what it will write: seen before a weight is read, and by a dry run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from megatrain.errors import DiskError, UsageError
from megatrain.files import refuse_folder_aside, refuse_lost_link
from megatrain.host.export import refuse_foreign
from megatrain.recipe import Recipe
from megatrain.train.model_config import model_path
from megatrain.train.resume import Start
from megatrain.train.rundir import RunDir


def check_places(rundir: RunDir, *, recipe: Recipe, start: Start) -> None:
    """Raises UsageError where something else is in the place of checkpoints, model, or what is written aside;
    DiskError where checkpoints lead to a disk that may not be written."""
    for path in (rundir.recipe, rundir.metrics, rundir.summary):
        refuse_folder_aside(path)
    _check_checkpoints(rundir.checkpoints)
    goes = start.replaces and rundir.model.is_dir() and not rundir.model.is_symlink()
    if recipe.output.export or goes:
        source = Path(model_path(recipe))
        refuse_foreign(rundir.model, source=source if source.is_dir() else None)


def _check_checkpoints(folder: Path) -> None:
    refuse_lost_link(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UsageError(
            "is a file, and the run's checkpoints belong there",
            where=str(folder),
            hint="remove it, or choose another folder with --output-dir",
        )
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    if read_only or not os.access(folder, os.W_OK | os.X_OK):
        raise DiskError(
            f"no checkpoint can be written there: {os.strerror(errno.EROFS if read_only else errno.EACCES)}",
            where=str(folder),
            hint="choose another folder with --output-dir",
        )
