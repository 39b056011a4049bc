"""A model's structure without its weights or a device: read from config.json, or found among what was read before."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import ModelError
from megatrain.model.sizes_cache import SizesKey, find_facts, keep_facts
from megatrain.model.sizes_types import ModelFacts
from megatrain.recipe import Recipe, known_model, resolve_asset
from megatrain.train.ways import Ways

_ASSUMED = "the shape of {} as it is shipped with megatrain: its own config.json is not in the hub's cache here"


@dataclass(frozen=True)
class Structure:
    """The numbers, and the config as it stands in the file."""

    facts: ModelFacts
    config: dict[str, Any]
    from_cache: bool
    assumed: str | None = None  # for people: which config stands for one that is not here


def read_structure(recipe: Recipe, *, ways: Ways) -> Structure:
    """Sizes of the recipe's model as a run would stream it on a device. Imports torch only where nothing is known yet.

    Raises ModelError for a model that cannot be had, or cannot run exactly.
    """
    config, assumed = raw_config(recipe), None
    if config is None and (shape := _known_shape(recipe)) is not None:
        recipe, assumed = shape, _ASSUMED.format(recipe.model.path)
        config = raw_config(recipe)
    key = SizesKey(
        config=config or {},
        overrides=dict(recipe.model.config),
        precision="bf16" if ways.bf16 else "fp32",
        attention="ours" if ways.ours else recipe.model.attention,
    )
    # a config that is not here yet is no key, nor is code that comes with the model and that we do not see
    known = config is not None and not (recipe.model.trust_remote_code and "auto_map" in config)
    facts = find_facts(key) if known else None
    if facts is not None:
        return Structure(facts, config or {}, from_cache=True, assumed=assumed)
    with collector_paused():
        from megatrain.train.structure_reading import read_facts

        facts = read_facts(recipe, bf16=ways.bf16, ours=ways.ours)
    if known:
        keep_facts(key, facts)
    return Structure(facts, config or raw_config(recipe) or {}, from_cache=False, assumed=assumed)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Imports make a million objects that all stay: looking for garbage among them would take a quarter of the time.

    Those of the first import are never looked at again, not even when the process ends.
    """
    was_on, first = gc.isenabled(), "transformers" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        if was_on:
            gc.enable()


def _known_shape(recipe: Recipe) -> Recipe | None:
    """The recipe with the shipped shape of its model in the model's place; None where there is none."""
    folder = known_model(recipe.model.path) if recipe.model.revision == "main" else None
    if folder is None:
        return None
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})


def raw_config(recipe: Recipe) -> dict[str, Any] | None:
    """config.json of a folder, or of a hub id that is in the local hub cache; None if it must be fetched first."""
    path = _config_file(recipe)
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot read the model's config.json: {error}",
            where=str(path),
            hint="model.path is a hub id or a folder that holds config.json",
        ) from error
    if not isinstance(config, dict):
        raise ModelError("config.json does not hold an object", where=str(path))
    return config


def _config_file(recipe: Recipe) -> Path | None:
    name = recipe.model.path
    folder = resolve_asset(name) if name.startswith("megatrain:") else Path(name).expanduser()
    if folder.exists():
        return folder if folder.is_file() else folder / "config.json"
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=recipe.model.revision)
    except ValueError:  # no hub id
        return None
    return Path(found) if isinstance(found, str) else None
