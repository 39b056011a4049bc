"""The files in a folder, and those that match a pattern. Links are not followed to where nobody pointed.

A folder of data comes from somewhere else as a whole. A link in it may lead to a private file, which would then be
trained on, or back to the folder, which never ends; so a link that leaves the folder is refused by name.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from megatrain.errors import DataError


def files_in(folder: Path) -> Iterator[Path]:
    """Every regular file below `folder`, hidden ones too. Raises DataError for a link that leads out of it."""
    allowed = _allowed(folder)
    for place, names, files in os.walk(folder, onerror=_raise):
        here = Path(place)
        for name in (*names, *files):
            path = here / name
            if path.is_symlink():
                _check_link(path, allowed=allowed)
        yield from (here / name for name in files if (here / name).is_file())


def _allowed(folder: Path) -> list[Path]:
    """Where the links of a folder may lead. The hub's cache keeps the contents of a snapshot beside all snapshots."""
    root = folder.resolve()
    return [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]


def _check_link(path: Path, *, allowed: list[Path]) -> None:
    target = path.resolve()
    inside = any(target.is_relative_to(root) for root in allowed)
    if inside and not target.is_dir():
        return
    what = "is a link to a folder" if inside else f"is a link that leads out of the folder, to {target}"
    hint = "give what it leads to as a path of its own in data.train, or copy it into the folder"
    raise DataError(what, where=str(path), hint=hint)


def _raise(error: OSError) -> None:
    raise error


def has_magic(path: str) -> bool:
    return glob.has_magic(path)


def matching(pattern: str) -> list[Path]:
    """The files that match a pattern, in order. ``**`` stands for any folders, but does not follow links to them."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return sorted(path for path in map(Path, glob.glob(pattern)) if path.is_file())
    at = parts.index("**")
    found = []
    for root in glob.glob(str(Path(*parts[:at]))) if at else ["."]:
        for place, names, files in os.walk(root):
            names[:] = [name for name in names if not name.startswith(".")]
            for path in (Path(place, name) for name in files if not name.startswith(".")):
                if _fits(path.relative_to(root).parts, pattern=parts[at:]) and path.is_file():
                    found.append(path)
    return sorted(set(found))


def _fits(names: tuple[str, ...], *, pattern: tuple[str, ...]) -> bool:
    """Whether a relative path fits: all places of the pattern that it can have reached, name by name."""
    places = _skipping({0}, pattern=pattern)
    for name in names:
        open_places = [place for place in places if place < len(pattern)]
        stays = {place for place in open_places if pattern[place] == "**"}
        moves = {place + 1 for place in open_places if fnmatch.fnmatchcase(name, pattern[place])}
        places = _skipping(stays | (moves - {place + 1 for place in stays}), pattern=pattern)
    return len(pattern) in places


def _skipping(places: set[int], *, pattern: tuple[str, ...]) -> set[int]:
    """`places`, and those behind a ``**``, which may stand for nothing."""
    reached = set(places)
    for place in range(len(pattern)):
        if place in reached and pattern[place] == "**":
            reached.add(place + 1)
    return reached
