"""From a file, its bases, the environment and ``--set`` to one checked Recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

from megatrain.errors import RecipeError
from megatrain.recipe import tree
from megatrain.recipe.assets import find_recipe
from megatrain.recipe.problems import Problem
from megatrain.recipe.scalars import shown
from megatrain.recipe.schema import Recipe
from megatrain.recipe.suggest import sections
from megatrain.recipe.tree import Mark, Node, Path, parse_key
from megatrain.recipe.validate import validate
from megatrain.recipe.yaml_text import parse
from megatrain.units import format_size

_SOURCES: tuple[Path, ...] = (("data", "train"), ("data", "eval"))
_MAX_BYTES = 4 << 20  # of a file; `parse` counts its characters
_MAX_BASES = 20


def load_recipe(path_or_name: str, *, overrides: Sequence[str] = (), output_dir: str | None = None) -> Recipe:
    """The recipe in a file, or the shipped one of that name, with overrides (``optimizer.lr=2e-5``) applied.

    Raises RecipeError that lists every mistake with its file, line and dotted key; NotAvailable when all that is wrong
    is that this version lacks a feature.
    """
    file = find_recipe(path_or_name)
    root, problems = _read(file, environment=os.environ, ancestors=())
    for override in overrides:
        root, more = _override(root, text=override, environment=os.environ)
        problems = [problem for problem in problems if not _lies_in(problem.key, key=override.partition("=")[0])] + more
    if output_dir is not None:
        root = tree.put(root, path=("output", "dir"), node=Node(output_dir, Mark("--output-dir")))
        problems = [problem for problem in problems if problem.key != "output.dir"]
    return validate(root, problems=problems, source=str(file))


def recipe_from_dict(values: Mapping[str, Any], *, source: str = "recipe") -> Recipe:
    """A recipe from plain values, checked like a file (for programs and tests)."""
    return validate(_located(values, mark=Mark(source)), problems=[], source=source)


def _located(value: Any, *, mark: Mark) -> Node:
    if isinstance(value, Mapping):
        return Node({str(key): _located(child, mark=mark) for key, child in value.items()}, mark)
    if isinstance(value, (list, tuple)):
        return Node([_located(child, mark=mark) for child in value], mark)
    return Node(value, mark)


def _read(file: File, *, environment: Mapping[str, str], ancestors: tuple[File, ...]) -> tuple[Node, list[Problem]]:
    """The tree of `file` over those of its bases."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise RecipeError(f"a file of {format_size(file.stat().st_size)} is no recipe", where=str(file))
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
    upper = Node(own, root.mark)
    # What this recipe writes itself need not be readable in its base.
    more = [problem for problem in more if tree.find(upper, path=parse_key(problem.key)) is None]
    return tree.merge(below, upper=upper), more + problems


def _read_base(
    file: File, *, base: Node, environment: Mapping[str, str], ancestors: tuple[File, ...]
) -> tuple[Node, list[Problem]]:
    path = file.parent / os.path.expanduser(base.value)
    if not os.path.isfile(path):
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
    if len(chain) > _MAX_BASES:
        raise RecipeError(f"base: a chain of more than {_MAX_BASES} recipes", where=str(base.mark))
    return _read(path, environment=environment, ancestors=chain)


def _override(root: Node, *, text: str, environment: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise RecipeError(f"`{text}` is not KEY=VALUE", where="--set", hint="like --set optimizer.lr=2e-5")
    source = f"--set {key}"
    if key == "base":
        raise RecipeError("a base can only be named in a file", where=source)
    node, problems = parse(value, source=source, environment=environment, lines=False)
    parts = parse_key(key)
    moved = [Problem(problem.mark, f"{key}.{problem.key}".rstrip("."), problem.text) for problem in problems]
    if key in sections() and node.value is None:
        return root, moved
    if len(parts) > 3 and isinstance(parts[2], int):
        root = _with_listed_sources(root, path=parts[:2])
    try:
        return tree.put(root, path=parts, node=node), moved
    except IndexError as error:
        raise RecipeError(f"{key}: the list has no such item; the first one is 0", where=source) from error


def _lies_in(other: str, *, key: str) -> bool:
    return other == key.strip() or other.startswith(f"{key.strip()}.")


def _with_listed_sources(root: Node, *, path: Path) -> Node:
    """`root` with the sources at `path` written as a list of mappings, so that keys of one can be set."""
    sources = tree.find(root, path=path)
    if path not in _SOURCES or sources is None or sources.value is None:
        return root
    items = sources.value if isinstance(sources.value, list) else [sources]
    mappings = [item if isinstance(item.value, dict) else Node({"path": item}, item.mark) for item in items]
    return tree.put(root, path=path, node=Node(mappings, sources.mark))
