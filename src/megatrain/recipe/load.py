"""From a file, its bases, the environment and ``--set`` to one checked Recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

from pydantic import ValidationError

from megatrain.errors import RecipeError
from megatrain.recipe import tree
from megatrain.recipe.assets import find_recipe
from megatrain.recipe.checks import check
from megatrain.recipe.problems import Problem, error_of
from megatrain.recipe.scalars import shown
from megatrain.recipe.schema import Recipe
from megatrain.recipe.suggest import hint_for_choice, hint_for_key, sections
from megatrain.recipe.tree import Mark, Node, Path, dotted
from megatrain.recipe.yaml_text import parse

_REQUIRED: tuple[Path, ...] = (("model", "path"), ("data", "train"), ("output", "dir"))
_SOURCES: tuple[Path, ...] = (("data", "train"), ("data", "eval"))
_RANGES = {
    "greater_than": ("gt", "must be more than"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be less than"),
    "less_than_equal": ("le", "must be at most"),
}


def load_recipe(path_or_name: str, *, overrides: Sequence[str] = (), output_dir: str | None = None) -> Recipe:
    """The recipe in a file, or the shipped one of that name, with overrides (``optimizer.lr=2e-5``) applied.

    Raises RecipeError that lists every mistake with its file, line and dotted key; NotAvailable when all that is wrong
    is that this version lacks a feature.
    """
    file = find_recipe(path_or_name)
    environment = os.environ
    root, problems = _read(file, environment=environment, ancestors=())
    for override in overrides:
        root, more = _override(root, text=override, environment=environment)
        problems += more
    if output_dir is not None:
        mark = Mark("--output-dir")
        root = tree.put(root, path=("output", "dir"), node=Node(output_dir, mark))
    return check_tree(root, problems=problems, source=str(file))


def recipe_from_dict(values: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """A recipe from plain values, checked like a file (for programs and tests)."""
    return check_tree(_located(values, mark=Mark(source)), problems=[], source=source)


def _located(value: Any, *, mark: Mark) -> Node:
    if isinstance(value, Mapping):
        return Node({str(key): _located(child, mark=mark) for key, child in value.items()}, mark)
    if isinstance(value, (list, tuple)):
        return Node([_located(child, mark=mark) for child in value], mark)
    return Node(value, mark)


def _read(file: File, *, environment: Mapping[str, str], ancestors: tuple[File, ...]) -> tuple[Node, list[Problem]]:
    """The tree of `file` over those of its bases."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError("is not UTF-8 text", where=str(file)) from error
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(file)) from error
    root, problems = parse(text, source=str(file), environment=environment)
    if root.value is None:
        raise RecipeError("the recipe is empty", where=f"{file}:1:1", hint="`megatrain recipe new` prints a template")
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "text"
        raise RecipeError(
            f"a recipe is a mapping of sections (model:, data:, ...), not {kind}", where=f"{file}:{root.mark.line}:1"
        )
    own = {key: child for key, child in root.value.items() if key != "base"}
    # A section whose keys are all commented out reads as null and stands for its defaults.
    own = {key: child for key, child in own.items() if not (key in sections() and child.value is None)}
    base = root.value.get("base")
    if base is None or base.value is None:
        return Node(own, root.mark), problems
    if not isinstance(base.value, str):
        problems.append(Problem(base.mark, "base", f"must be the path of a recipe, not {shown(base.value)}"))
        return Node(own, root.mark), problems
    below, more = _read_base(file, base=base, environment=environment, ancestors=ancestors)
    return tree.merge(below, upper=Node(own, root.mark)), more + problems


def _read_base(
    file: File, *, base: Node, environment: Mapping[str, str], ancestors: tuple[File, ...]
) -> tuple[Node, list[Problem]]:
    path = file.parent / File(base.value).expanduser()
    if not path.is_file():
        try:
            path = find_recipe(base.value)
        except RecipeError as error:
            raise RecipeError(
                f"base: there is no recipe `{base.value}` beside this one", where=str(base.mark), hint=error.hint
            ) from error
    chain = (*ancestors, file.resolve())
    if path.resolve() in chain:
        names = " -> ".join(link.name for link in (*chain, path.resolve()))
        raise RecipeError(f"base: recipes inherit from each other in a circle: {names}", where=str(base.mark))
    return _read(path, environment=environment, ancestors=chain)


def _override(root: Node, *, text: str, environment: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise RecipeError(f"`{text}` is not KEY=VALUE", where="--set", hint="like --set optimizer.lr=2e-5")
    source = f"--set {key}"
    node, problems = parse(value, source=source, environment=environment, lines=False)
    parts: Path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
    moved = [Problem(problem.mark, f"{key}.{problem.key}".rstrip("."), problem.text) for problem in problems]
    if key in sections() and node.value is None:
        return root, moved
    if len(parts) > 3 and isinstance(parts[2], int):
        root = _with_listed_sources(root, path=parts[:2])
    try:
        return tree.put(root, path=parts, node=node), moved
    except IndexError as error:
        raise RecipeError(f"{key}: the list has no such item; the first one is 0", where=source) from error


def _with_listed_sources(root: Node, *, path: Path) -> Node:
    """`root` with the sources at `path` written as a list of mappings, so that keys of one can be set."""
    sources = tree.find(root, path=path)
    if path not in _SOURCES or sources is None or sources.value is None:
        return root
    items = sources.value if isinstance(sources.value, list) else [sources]
    mappings = [item if isinstance(item.value, dict) else Node({"path": item}, item.mark) for item in items]
    return tree.put(root, path=path, node=Node(mappings, sources.mark))


def check_tree(root: Node, *, problems: Sequence[Problem], source: str) -> Recipe:
    """The Recipe that `root` spells. Raises as `load_recipe`."""
    found = list(problems)
    unread = {problem.key for problem in found}
    try:
        recipe = Recipe.model_validate(tree.plain(root))
        faulty = unread
    except ValidationError as error:
        paths = [_own_path(root, path=detail["loc"]) for detail in error.errors(include_url=False)]
        for path, detail in zip(paths, error.errors(include_url=False), strict=True):
            if dotted(path) not in unread:
                found.append(_problem(root, path=path, detail=detail))
        faulty = {dotted(path) for path in paths} | unread
        rest = _without_faults(root, paths=paths)
        if rest is None:
            raise error_of(found, source=source) from error
        recipe = rest
    for finding in check(recipe):
        if not any(_touches(key, faulty=faulty) for key in finding.keys):
            path = tuple(int(part) if part.isdigit() else part for part in finding.keys[0].split("."))
            mark = tree.mark_at(root, path=path)
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


def _problem(root: Node, *, path: Path, detail: Any) -> Problem:
    mark, key, kind = tree.mark_at(root, path=path), dotted(path), detail["type"]
    context = detail.get("ctx", {})
    written = tree.find(root, path=path)
    value = detail["input"] if written is None else tree.plain(written)
    if kind == "extra_forbidden":
        what = "section" if len(path) == 1 and isinstance(detail["input"], dict) else "key"
        return Problem(mark, key, f"there is no such {what}", hint_for_key(path))
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


_REQUIRED_HINTS = {
    "model": "model: {path: ...} takes a hub id or a folder",
    "model.path": "a hub id or a folder with config.json",
    "data": "data: {train: ...} takes a file, a folder or a hub id",
    "data.train": "a file, a folder, a hub id, or a list of them",
    "output": "output: {dir: ...} takes the folder of the run",
    "output.dir": "the folder of the run, e.g. runs/first",
}
