"""Small results kept in the user's cache folder, which anyone may delete at any time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/megatrain`` or ``~/.cache/megatrain``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "megatrain"


def read_kept(name: str) -> dict[str, Any] | None:
    """What `keep` wrote; None where there is nothing, or nothing that can be read."""
    try:
        found = json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def keep(name: str, values: Mapping[str, Any]) -> bool:
    """Write `values` so that a reader sees all of it or what was there before. False where that cannot be done."""
    path = cache_folder() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(aside, path)
    except OSError:
        Path(aside).unlink(missing_ok=True)
        return False
    return True
