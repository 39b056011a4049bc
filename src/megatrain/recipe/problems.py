"""Mistakes in a recipe, gathered so that all of them are told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.errors import MegatrainError, NotAvailable, RecipeError, addressed
from megatrain.recipe.tree import Mark

_TOLD = 50  # mistakes; who has more mends these first
_LONGEST_KEY = 120


@dataclass(frozen=True)
class Problem:
    """One mistake: where it was written, which key it is about, what is wrong and what to do."""

    mark: Mark
    key: str  # dotted; empty where the whole file is meant
    text: str
    hint: str | None = None
    available_later: bool = False

    @property
    def message(self) -> str:
        key = self.key if len(self.key) <= _LONGEST_KEY else f"{self.key[:_LONGEST_KEY]}..."
        return f"{key}: {self.text}" if key else self.text


def error_of(problems: Sequence[Problem], *, source: str) -> MegatrainError:
    """One exception that tells all `problems` in the order of the file; the order of lines, not of discovery."""
    ordered = sorted(set(problems), key=lambda p: (p.mark.source != source, p.mark.source, p.mark.line or 0, p.key))
    kind = NotAvailable if all(problem.available_later for problem in ordered) else RecipeError
    if len(ordered) == 1:
        problem = ordered[0]
        return kind(problem.message, hint=problem.hint, where=str(problem.mark))
    lines = [f"{len(ordered)} problems"]
    for problem in ordered[:_TOLD]:
        lines.append(f"  {addressed(problem.message, where=str(problem.mark))}")
        if problem.hint:
            lines.append(f"    {problem.hint}")
    if len(ordered) > _TOLD:
        lines.append(f"  and {len(ordered) - _TOLD} more")
    return kind("\n".join(lines), where=source)
