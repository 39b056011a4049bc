"""``megatrain recipe``: list, copy, check, show, schema, new. None of them loads torch."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from megatrain.cli.output import emit, error_object, guarded, help_if_alone, print_error
from megatrain.errors import MegatrainError, UsageError

recipes = typer.Typer(help="List, copy, check and show recipes.", invoke_without_command=True)

SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. optimizer.lr=2e-5. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")]
ForceOption = Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")]


@recipes.callback()
def _root(context: typer.Context) -> None:
    help_if_alone(context)


@recipes.command("list")
def list_recipes(json: JsonOption = False) -> None:
    """The recipes that come with megatrain."""
    with guarded(json=json):
        from megatrain.recipe import shipped_recipes

        found = {name: _summary(path) for name, path in shipped_recipes().items()}
        if json:
            emit({"status": "ok", "recipes": [{"name": name, "summary": text} for name, text in found.items()]})
            return
        width = max((len(name) for name in found), default=0)
        for name, text in found.items():
            print(f"{name:<{width}}  {text}")


def _summary(path: Path) -> str:
    """The first line of the comment that every shipped recipe begins with."""
    return path.read_text().partition("\n")[0].removeprefix("#").strip()


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A shipped recipe.")],
    to: Annotated[
        Optional[Path],  # noqa: UP045  # typer reads it at run time
        typer.Argument(metavar="[FILE]", help="Where to; NAME.yaml if left out."),
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Copy a shipped recipe, to edit it."""
    with guarded(json=json):
        from megatrain.recipe import find_recipe

        source = find_recipe(name)
        target = to if to is not None else Path(f"{source.stem}.yaml")
        if target.is_dir():
            target = target / source.name
        _write(target, text=source.read_text(), force=force)
        if json:
            emit({"status": "ok", "recipe": name, "file": str(target)})
        else:
            print(target)


def _write(target: Path, *, text: str, force: bool) -> None:
    if target.exists() and not force:
        raise UsageError("the file exists", where=str(target), hint="--force replaces it")
    try:
        target.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(target)) from error


@recipes.command()
def check(
    paths: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="Files, or names of shipped recipes.")],
    overrides: SetOption = [],  # noqa: B006  # typer copies it
    json: JsonOption = False,
) -> None:
    """Check recipes without training: every mistake, with file, line and key."""
    with guarded(json=json):
        from megatrain.recipe import load_recipe

        failures: list[MegatrainError] = []
        results: list[dict[str, Any]] = []
        for path in paths:
            try:
                load_recipe(path, overrides=overrides)
            except MegatrainError as error:
                failures.append(error)
                results.append({"recipe": path, **error_object(error)})
                print_error(error)
            else:
                results.append({"recipe": path, "status": "ok"})
                if not json:
                    print(f"{path}: ok")
        if json:
            emit({**(error_object(failures[0]) if failures else {"status": "ok"}), "recipes": results})
        if failures:
            raise typer.Exit(failures[0].exit_code)


@recipes.command()
def show(
    path: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")],
    overrides: SetOption = [],  # noqa: B006
    json: JsonOption = False,
) -> None:
    """The resolved recipe: bases, environment and overrides applied, defaults filled in."""
    with guarded(json=json):
        from megatrain.recipe import load_recipe

        recipe = load_recipe(path, overrides=overrides)
        if json:
            emit(recipe.to_dict())
        else:
            print(recipe.to_yaml(), end="")


@recipes.command()
def schema(json: JsonOption = False) -> None:
    """JSON Schema of a recipe, for editors (on one line with --json)."""
    with guarded(json=json):
        from megatrain.recipe.template import json_schema

        if json:
            emit(json_schema())
        else:
            print(json_format.dumps(json_schema(), indent=2))


@recipes.command()
def new(
    to: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="[FILE]", help="Where to; stdout if left out."),
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """A commented recipe with every key and its default."""
    with guarded(json=json):
        from megatrain.recipe.template import template

        if to is not None:
            _write(to, text=template(), force=force)
            if json:
                emit({"status": "ok", "file": str(to)})
            else:
                print(to)
        elif json:
            emit({"status": "ok", "recipe": template()})
        else:
            print(template(), end="")
