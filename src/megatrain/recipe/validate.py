"""From a located tree to a Recipe, or to everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from megatrain.recipe import tree
from megatrain.recipe.checks import check
from megatrain.recipe.problems import Problem, error_of
from megatrain.recipe.scalars import shown
from megatrain.recipe.schema import Recipe
from megatrain.recipe.suggest import hint_for_choice, hint_for_key
from megatrain.recipe.tree import Node, Path, dotted, parse_key

_REQUIRED: tuple[Path, ...] = (("model", "path"), ("data", "train"), ("output", "dir"))
_SOURCES: tuple[Path, ...] = (("data", "train"), ("data", "eval"))
_FEW = 200  # mistakes; beyond them nobody is helped by what was meant by each, and by what else may be wrong
_RANGES = {
    "greater_than": ("gt", "must be more than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}
_REQUIRED_HINTS = {
    "model": "model: {path: ...} takes a hub id or a folder",
    "model.path": "a hub id or a folder with config.json",
    "data": "data: {train: ...} takes a file, a folder or a hub id",
    "data.train": "a file, a folder, a hub id, or a list of them",
    "output": "output: {dir: ...} takes the folder of the run",
    "output.dir": "the folder of the run, e.g. runs/first",
}


def validate(root: Node, *, problems: Sequence[Problem], source: str) -> Recipe:
    """The Recipe that `root` spells. Raises as `load_recipe`."""
    found = list(problems)
    unread = {problem.key for problem in found}
    try:
        recipe = Recipe.model_validate(tree.plain(root))
        faulty = unread
    except ValidationError as error:
        paths = [_own_path(root, path=detail["loc"]) for detail in error.errors(include_url=False)]
        few = len(paths) <= _FEW
        for path, detail in zip(paths, error.errors(include_url=False), strict=True):
            if dotted(path) not in unread:
                found.append(_problem(root, path=path, detail=detail, hints=few))
        faulty = {dotted(path) for path in paths} | unread
        rest = _without_faults(root, paths=paths) if few else None
        if rest is None:
            raise error_of(found, source=source) from error
        recipe = rest
    for finding in check(recipe):
        if not any(_touches(key, faulty=faulty) for key in finding.keys):
            mark = tree.mark_at(root, path=parse_key(finding.keys[0]))
            found.append(Problem(mark, finding.keys[0], finding.text, finding.hint, finding.available_later))
    if found:
        raise error_of(found, source=source)
    return recipe


def _touches(key: str, *, faulty: set[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in faulty)


def _own_path(root: Node, *, path: Path) -> Path:
    """The path as the file has it: where data.train is one path or mapping, there is no index."""
    if len(path) >= 3 and path[:2] in _SOURCES:
        sources = tree.find(root, path=path[:2])
        if sources is not None and not isinstance(sources.value, list):
            return (*path[:2], *(path[3:] if isinstance(sources.value, dict) else ()))
    return path


def _without_faults(root: Node, *, paths: Sequence[Path]) -> Recipe | None:
    """The recipe with its malformed values left at their defaults, so that the rest can be checked as well."""
    for path in paths:
        root = tree.without(root, path=path)
    values = tree.plain(root)
    for section, key in _REQUIRED:
        inside = values.setdefault(section, {}) if isinstance(values, dict) else {}
        if isinstance(inside, dict):
            inside.setdefault(key, "?")
    try:
        return Recipe.model_validate(values)
    except ValidationError:
        return None


def _problem(root: Node, *, path: Path, detail: Any, hints: bool) -> Problem:
    mark, key, kind = tree.mark_at(root, path=path), dotted(path), detail["type"]
    context = detail.get("ctx", {})
    written = tree.find(root, path=path)
    value = detail["input"] if written is None else tree.plain(written)
    if kind == "extra_forbidden":
        what = "section" if len(path) == 1 and isinstance(detail["input"], dict) else "key"
        return Problem(mark, key, f"there is no such {what}", hint_for_key(path) if hints else None)
    if kind == "missing":
        return Problem(mark, key, "must be given", _REQUIRED_HINTS.get(key))
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        return Problem(mark, key, f"must be {listed}, not {shown(value)}", hint_for_choice(value, choices=choices))
    if kind in _RANGES:
        limit, words = _RANGES[kind]
        return Problem(mark, key, f"{words} {context[limit]:g}, not {shown(value)}")
    if kind in {"model_type", "model_attributes_type", "dataclass_type"}:
        return Problem(mark, key, f"must be a mapping of keys, not {shown(value)}")
    return Problem(mark, key, str(context.get("text", detail["msg"])))
