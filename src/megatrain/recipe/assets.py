"""What is shipped: recipes by name, and models and data as ``megatrain:NAME``."""

from __future__ import annotations

import difflib
import os.path
from pathlib import Path

from megatrain.errors import RecipeError

PREFIX = "megatrain:"
_PACKAGE = Path(__file__).resolve().parent.parent
_ASSETS = _PACKAGE / "assets"
_KNOWN_MODELS = Path(__file__).resolve().parent / "known_models"


def shipped_recipes() -> dict[str, Path]:
    """Recipe files by name: in the package, or in a source checkout whose link to them was lost."""
    folders = (_PACKAGE / "recipes", _PACKAGE.parent.parent / "recipes")
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def assets() -> list[str]:
    """Names of the shipped models and data files."""
    return sorted(path.name for path in _ASSETS.iterdir() if path.is_dir() or path.suffix == ".jsonl")


def known_model(hub_id: str) -> Path | None:
    """A folder with nothing but the shape of a public model that a shipped recipe names, as a config.json; None
    where it is not known. For planning without the hub, never for training: it is not the model's own file.
    """
    folder = _KNOWN_MODELS / hub_id.replace("/", "--")
    return folder if hub_id in known_models() else None


def known_models() -> list[str]:
    """Hub ids."""
    return sorted(path.name.replace("--", "/") for path in _KNOWN_MODELS.iterdir())


def is_asset(path: str) -> bool:
    return path.startswith(PREFIX)


def resolve_asset(path: str) -> Path:
    """The file or folder that ``megatrain:NAME`` stands for; any other path as it is.

    Raises RecipeError for a name that is not shipped.
    """
    if not is_asset(path):
        return Path(path)
    name = path.removeprefix(PREFIX)
    known = assets()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{PREFIX}{close[0]}`?" if close else f"there are {', '.join(PREFIX + n for n in known)}"
        raise RecipeError(f"`{path}` is not shipped with megatrain", hint=hint)
    return _ASSETS / name


def find_recipe(path_or_name: str) -> Path:
    """A file, or a shipped recipe by name. Raises RecipeError."""
    path = Path(os.path.expanduser(path_or_name))  # leaves the name of an unknown user as it is
    if os.path.isfile(path):
        return path
    shipped = shipped_recipes()
    if path_or_name in shipped:
        return shipped[path_or_name]
    if os.path.isdir(path):
        raise RecipeError("is a folder, not a recipe", where=path_or_name)
    close = difflib.get_close_matches(path.stem, list(shipped), n=1)
    hint = f"did you mean the shipped recipe `{close[0]}`?" if close else f"shipped recipes: {', '.join(shipped)}"
    raise RecipeError("there is no such file or shipped recipe", where=path_or_name, hint=hint)
