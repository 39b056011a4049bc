"""Everything that is fuzzed, by name."""

from __future__ import annotations

from fuzz.checkpoint_targets import CHECKPOINTS
from fuzz.model_targets import MODELS
from fuzz.recipe_targets import RECIPES
from fuzz.row_targets import ROWS
from fuzz.target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (*RECIPES, *ROWS, *MODELS, *CHECKPOINTS)}
