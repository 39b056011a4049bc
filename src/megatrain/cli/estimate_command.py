"""``megatrain estimate-memory``: will it fit, where is the limit, what to change. Without torch where it can be."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatrain.cli.output import emit
from megatrain.errors import UsageError
from megatrain.plan.rates import GPUS, named_gpu
from megatrain.recipe import Recipe, load_recipe
from megatrain.train.machine import Described
from megatrain.units import parse_rate, parse_size

BARE_RECIPE = """\
model: {{path: {path}, init: random}}
data: {{train: not-read}}
output: {{dir: .}}
"""


def run(
    recipe: str | None,
    *,
    model: str | None,
    overrides: Sequence[str],
    gpu: str | None,
    vram: str | None,
    host: str | None,
    link: str | None,
    cores: int | None,
    largest: bool,
    json: bool,
) -> int:
    """Print what the recipe needs; returns 0 if it fits and 3 if not."""
    described = Described(
        vram=_number(vram, option="--vram", parse=parse_size),
        host=_number(host, option="--host", parse=parse_size),
        link=_number(link, option="--link", parse=parse_rate),
        cores=cores,
        gpu=_gpu(gpu, vram=vram),
    )
    loaded = _recipe(recipe, model=model, overrides=overrides)
    from megatrain.train.estimate import estimate_memory

    found = estimate_memory(loaded, described=described, largest=largest)
    result = found.to_json()
    if json:
        emit(result)
    else:
        from megatrain.cli.estimate_text import show

        show(found)
    return int(result["exit_code"])


def _number(text: str | None, *, option: str, parse: Callable[[str], int]) -> int | None:
    if text is None:
        return None
    try:
        found = parse(text)
    except ValueError as error:
        raise UsageError(str(error), where=option) from None
    if found <= 0:
        raise UsageError("nothing fits into 0 bytes", where=option)
    return found


def _gpu(name: str | None, *, vram: str | None) -> str | None:
    """The name of a GPU in the table of rates. Its memory must be given: a card of one name comes in several sizes."""
    if name is None:
        return None
    known = named_gpu(name)
    if known is None:
        names = ", ".join(gpu.name for gpu in GPUS)
        raise UsageError(f"`{name}` is not a GPU whose speed is known here", where="--gpu", hint=f"one of {names}")
    if vram is None:
        raise UsageError(
            "how much of its memory may be taken is not known", where="--gpu", hint="add --vram SIZE, e.g. --vram 24GiB"
        )
    return known.name


def _recipe(recipe: str | None, *, model: str | None, overrides: Sequence[str]) -> Recipe:
    if (recipe is None) == (model is None):
        raise UsageError(
            "estimate-memory takes a RECIPE or --model PATH", hint="for example: megatrain estimate-memory quickstart"
        )
    if recipe is not None:
        return load_recipe(recipe, overrides=overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.yaml")
        quoted = "'" + str(model).replace("'", "''") + "'"
        path.write_text(BARE_RECIPE.format(path=quoted), encoding="utf-8")
        return load_recipe(str(path), overrides=overrides)
