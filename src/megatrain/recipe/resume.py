"""What may change between a run and its resumption."""

from __future__ import annotations

from typing import Any

from megatrain.recipe.schema import Recipe

_FREE_SECTIONS = {"output", "report", "memory"}
_FREE_KEYS = {"train.epochs", "train.steps", "train.eval_every", "train.save_every", "train.log_every"}


def diff_for_resume(old: Recipe, new: Recipe) -> list[str]:
    """Dotted keys that differ and must not: all but output, report, memory, intervals, epochs and steps."""
    before, after = _leaves(old.to_dict()), _leaves(new.to_dict())
    changed = [key for key in {**before, **after} if before.get(key, _ABSENT) != after.get(key, _ABSENT)]
    changed = [key for key in changed if not any(other.startswith(f"{key}.") for other in changed)]
    return [key for key in changed if key.split(".")[0] not in _FREE_SECTIONS and key not in _FREE_KEYS]


_ABSENT = object()


def _leaves(value: Any, *, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = {str(index): item for index, item in enumerate(value)}.items()
    else:
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for key, child in items:
        leaves.update(_leaves(child, prefix=f"{prefix}.{key}" if prefix else str(key)))
    return leaves
