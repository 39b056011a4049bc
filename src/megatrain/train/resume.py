"""Where a run starts: afresh, from a checkpoint, or not at all because it is finished."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import RecipeError, UsageError
from megatrain.recipe import Recipe, diff_for_resume, recipe_from_dict
from megatrain.train.checkpoint import Checkpoint, Found, find_checkpoints
from megatrain.train.manifest import Damaged, Identity
from megatrain.train.rundir import RunDir
from megatrain.train.state import TrainState


@dataclass(frozen=True)
class Start:
    """The decision, before anything is written."""

    candidates: tuple[Checkpoint, ...]  # newest first; the next is taken if reading one shows damage. Empty: afresh
    replaces: bool  # something of an earlier run is here and goes when training begins
    in_place: bool  # the candidates are of this run folder, and its metrics go on
    finished: bool  # nothing is left to do
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def decide(rundir: RunDir, *, resume: str, recipe: Recipe) -> Start:
    """resume: "never", "auto", or the path of a run folder or checkpoint.

    Raises UsageError when the folder holds a run that may not be touched or there is nothing usable to resume,
    RecipeError when the recipe changed in more than it may.
    """
    _refuse_own_output(rundir, recipe=recipe)
    if resume == "never":
        return _afresh(rundir, recipe=recipe)
    if resume == "auto":
        return _automatic(rundir, recipe=recipe)
    return _from_path(rundir, path=Path(resume).expanduser(), recipe=recipe)


def check_same_run(identity: Identity, *, now: Identity) -> None:
    """What only shows once data and model are there: rows, architecture and precision must be the same."""
    for what, before, after, hint in (
        ("the model's architecture", identity.config_hash, now.config_hash, "model.path holds another model now"),
        ("the precision", identity.precision, now.precision, f"set train.precision={identity.precision}"),
        ("the data", identity.data, now.data, "the files or the tokenizer are not what they were; start a new run"),
    ):
        if before != after:
            message = f"{what} is not that of the checkpoint ({before}, now {after})"
            raise UsageError(message, hint=hint, where="--resume")


def _refuse_own_output(rundir: RunDir, *, recipe: Recipe) -> None:
    """The export would overwrite the model that it takes keys and tokenizer from."""
    for key, path in (("model.path", recipe.model.path), ("tokenizer.path", recipe.tokenizer.path)):
        if path is not None and Path(path).expanduser().resolve() == rundir.model.resolve():
            raise UsageError(
                f"{path} is where this run would write its own model",
                hint="choose another folder with output.dir or --output-dir",
                where=key,
            )


def _afresh(rundir: RunDir, *, recipe: Recipe) -> Start:
    held = rundir.holds_run()
    if held and not recipe.output.overwrite:
        raise UsageError(
            f"{rundir.path} holds another run",
            hint="--resume auto goes on with it, --output-dir DIR takes another folder, "
            "--set output.overwrite=true replaces it",
            where="output.dir",
        )
    return Start((), replaces=held, in_place=False, finished=False, notes=(), warnings=())


def _automatic(rundir: RunDir, *, recipe: Recipe) -> Start:
    found = find_checkpoints(rundir.checkpoints)
    if found.usable:
        return _resume(rundir, found=found, recipe=recipe, in_place=True)
    warnings = _skipped(found)
    if rundir.read_summary().get("status") == "done":
        return _finished_without_checkpoints(rundir, skipped=warnings, recipe=recipe)
    if os.path.lexists(rundir.model):
        raise UsageError(
            f"{rundir.model} is there, but neither a checkpoint nor a run.json that says that a run has ended",
            hint="choose another folder with --output-dir, or move it away: --resume auto never replaces a model",
            where="--resume",
        )
    held = rundir.holds_run()
    notes = (f"nothing to resume in {rundir.path}; starting afresh",) if held else ()
    return Start((), replaces=held, in_place=True, finished=False, notes=notes, warnings=warnings)


def _finished_without_checkpoints(rundir: RunDir, *, skipped: tuple[str, ...], recipe: Recipe) -> Start:
    """Its model may be all that is wanted; nothing else can be had from here."""
    hint = "choose another folder with --output-dir for another run"
    before, why = rundir.read_recipe(), "; ".join(skipped)
    changed = _changed_in_all(before, recipe) if before is not None else []
    if changed:
        raise RecipeError(
            f"{', '.join(changed)} changed since the run in {rundir.path}, which is finished and has no usable "
            "checkpoint to go on from",
            hint=hint,
            where="--resume",
        )
    if before is None:
        why = why or f"nor a {rundir.recipe.name} that says what was trained"
    elif recipe.output.export and not rundir.model.exists():
        why = why or "its model is gone too"
    else:
        why = why or _other_dtype(rundir, before=before, recipe=recipe)
    if why:
        raise UsageError(
            f"{rundir.path} holds a finished run, but no usable checkpoint: {why}", hint=hint, where="--resume"
        )
    note = f"the run in {rundir.path} is finished; there is nothing to resume"
    return Start((), replaces=False, in_place=True, finished=True, notes=(note,), warnings=())


def _changed_in_all(before: Recipe, recipe: Recipe) -> list[str]:
    """Dotted keys that may not change where nothing can be gone on with: the run's length is among them."""
    lengths = {
        "train.epochs": (before.train.epochs, recipe.train.epochs),
        "train.steps": (before.train.steps, recipe.train.steps),
    }
    return diff_for_resume(before, recipe) + [key for key, (was, now) in lengths.items() if was != now]


def _other_dtype(rundir: RunDir, *, before: Recipe, recipe: Recipe) -> str:
    """What is to be said of the exported model where the recipe now wants it otherwise; nothing where it does not."""
    was, wanted, there = before.output.export_dtype, recipe.output.export_dtype, rundir.exported_dtype()
    if not recipe.output.export or was == wanted or wanted == there:
        return ""
    return f"{rundir.model} was exported as {there or was}, not as output.export_dtype={wanted}"


def _from_path(rundir: RunDir, *, path: Path, recipe: Recipe) -> Start:
    if (path / "checkpoints").is_dir():
        found, folder = find_checkpoints(path / "checkpoints"), path / "checkpoints"
    else:
        found, folder = _single(path), path.parent
    if not found.usable:
        reasons = "; ".join(_skipped(found)) or f"{path} holds no checkpoint"
        raise UsageError(reasons, hint="give a run folder, or one of its checkpoints/step-...", where="--resume")
    in_place = rundir.checkpoints.is_dir() and folder.resolve() == rundir.checkpoints.resolve()
    if in_place:
        return _resume(rundir, found=found, recipe=recipe, in_place=True)
    replaces = _afresh(rundir, recipe=recipe).replaces
    start = _resume(rundir, found=found, recipe=recipe, in_place=False)
    return Start(start.candidates, replaces, False, start.finished, start.notes, start.warnings)


def _single(path: Path) -> Found:
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder", hint="give a run folder or a checkpoint", where="--resume")
    try:
        return Found((Checkpoint.open(path),), ())
    except Damaged as error:
        raise UsageError(f"{path} cannot be used: {error}", where="--resume") from error


def _resume(rundir: RunDir, *, found: Found, recipe: Recipe, in_place: bool) -> Start:
    newest = found.usable[0]
    before = recipe_from_dict(newest.manifest.identity.recipe, source=str(newest.path))
    changed = diff_for_resume(before, recipe)
    if changed:
        raise RecipeError(
            f"{', '.join(changed)} changed since {newest.path.name}; a resumed run goes on as it began",
            hint="only output, report, memory, intervals, epochs and steps may change; anything else is a new run",
            where="--resume",
        )
    _refuse_beyond(found, recipe=recipe)
    same_length = (before.train.epochs, before.train.steps) == (recipe.train.epochs, recipe.train.steps)
    exported = rundir.model.exists() or not recipe.output.export
    done = same_length and exported and rundir.read_summary().get("status") == "done"
    finished = done and in_place and not _goes_back(newest, rundir=rundir)
    if not finished:
        note = f"resuming {newest.path} after step {newest.state.step}"
        return Start(found.usable, False, in_place, False, (note,), _skipped(found))
    note = f"the run in {rundir.path} is finished after {newest.state.step} steps; there is nothing to resume"
    other = _other_dtype(rundir, before=rundir.read_recipe() or before, recipe=recipe)
    if other:
        other += f": megatrain export {rundir.path} OUT --dtype {recipe.output.export_dtype} writes it elsewhere"
    return Start(found.usable, False, in_place, True, (note,), (*_skipped(found), *filter(None, [other])))


def _refuse_beyond(found: Found, *, recipe: Recipe) -> None:
    """Raises UsageError for a checkpoint of a step that the run is not to reach: what is kept would not be what the
    recipe asks for."""
    newest = found.usable[0]
    if not _is_beyond(newest.state, recipe=recipe):
        return
    asked = f"train.steps={recipe.train.steps}" if recipe.train.steps is not None else ""
    asked = asked or f"train.epochs={recipe.train.epochs}"
    earlier = [c for c in find_checkpoints(newest.path.parent).usable if not _is_beyond(c.state, recipe=recipe)]
    raise UsageError(
        f"{newest.path.name} is {newest.state.epochs:g} epochs and {newest.state.step} steps into the run, "
        f"and {asked} ends before",
        hint=f"--resume {earlier[0].path} goes on from before that end"
        if earlier
        else "no checkpoint from before that end is left: start a new run, or ask for more",
        where="--resume",
    )


def _is_beyond(state: TrainState, *, recipe: Recipe) -> bool:
    steps, epochs = recipe.train.steps, recipe.train.epochs
    return (steps is not None and state.step > steps) or (epochs is not None and state.epochs > epochs)


def _goes_back(checkpoint: Checkpoint, *, rundir: RunDir) -> bool:
    """Who names a checkpoint that is not the run's newest wants to go on from there, also when the run is finished."""
    there = find_checkpoints(rundir.checkpoints).usable
    return not there or checkpoint.state.step < there[0].state.step


def _skipped(found: Found) -> tuple[str, ...]:
    return tuple(f"{skipped.path.name} was skipped: {skipped.reason}" for skipped in found.skipped)
