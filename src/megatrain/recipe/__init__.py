"""What the user asked for: a recipe, checked, immutable, and free of anything that depends on the machine."""

from megatrain.recipe.assets import find_recipe, is_asset, known_model, resolve_asset, shipped_recipes
from megatrain.recipe.load import load_recipe, recipe_from_dict
from megatrain.recipe.resume import diff_for_resume
from megatrain.recipe.schema import Recipe, Source

__all__ = [
    "Recipe",
    "Source",
    "diff_for_resume",
    "find_recipe",
    "is_asset",
    "known_model",
    "load_recipe",
    "recipe_from_dict",
    "resolve_asset",
    "shipped_recipes",
]
