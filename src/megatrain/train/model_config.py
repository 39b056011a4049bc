"""The config of the model that a recipe names."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from megatrain.model.skeleton import load_config
from megatrain.recipe import Recipe, resolve_asset


def read_config(recipe: Recipe) -> PretrainedConfig:
    """With the recipe's overrides. Raises ModelError."""
    return load_config(
        model_path(recipe),
        revision=recipe.model.revision,
        overrides=recipe.model.config,
        trust_remote_code=recipe.model.trust_remote_code,
    )


def model_path(recipe: Recipe) -> str:
    """A folder, or a hub id."""
    path = recipe.model.path
    if path.startswith("megatrain:"):
        return str(resolve_asset(path))
    local = Path(path).expanduser()
    return str(local) if local.exists() else path


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest sequence the model knows; None where positions have no end."""
    value = getattr(config, "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None
