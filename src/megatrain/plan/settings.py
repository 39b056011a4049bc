"""What planning reads of a recipe."""

from __future__ import annotations

from typing import Protocol


class MemorySettings(Protocol):
    """The `memory` section of a recipe, as far as this room reads it: bytes or numbers, or "auto"."""

    @property
    def vram(self) -> int | str: ...
    @property
    def host(self) -> int | str: ...
    @property
    def micro_batch(self) -> int | str: ...
    @property
    def slots(self) -> int | str: ...
    @property
    def activations(self) -> str: ...
    @property
    def threads(self) -> int | str: ...
