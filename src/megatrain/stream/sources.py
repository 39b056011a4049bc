"""What a place on the device is filled with: a whole unit, a unit with a gap, or rows of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatrain.host.store import HostUnit
from megatrain.stream.device import Event


@dataclass(frozen=True)
class Piece:
    """One copy: uint8 bytes of host memory, and what they are called where accesses are checked."""

    source: Tensor
    reads: str
    at: int | None = None  # byte of the place where it begins; None: behind the piece before


class Source(Protocol):
    """Pieces of what a place is filled with. `unit`: whose update must be done before they are read."""

    @property
    def unit(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def pieces(self, *, loaded: Event) -> Iterator[Piece]:
        """What to copy, now. loaded: the event of the copies of last time."""


class HostBytes:
    """Bytes of one unit as they lie in the store, in one or several ranges."""

    def __init__(self, host: HostUnit, ranges: Sequence[slice]) -> None:
        self.unit = host.unit.index
        self.nbytes = sum(one.stop - one.start for one in ranges)
        self._pieces = [Piece(host.hi[one], f"host{self.unit}") for one in ranges]

    @classmethod
    def whole(cls, host: HostUnit) -> HostBytes:
        return cls(host, [slice(0, host.unit.layout.nbytes)])

    def pieces(self, *, loaded: Event) -> Iterator[Piece]:
        return iter(self._pieces)
