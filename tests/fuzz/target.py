"""A part of the program that reads what others wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True)
class Target:
    """`read` gives `data` to the program, as a file in an empty `folder` where it wants one."""

    name: str
    read: Callable[[bytes, Path], None]
    inputs: SearchStrategy[bytes]
