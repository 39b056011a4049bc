from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# A slow machine is no failure: no test measures time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a recipe file and returns its path."""
    numbers = itertools.count()

    def save(text: str, *, name: str | None = None) -> str:
        path = tmp_path / (name or f"recipe-{next(numbers)}.yaml")
        path.write_text(text)
        return str(path)

    return save
