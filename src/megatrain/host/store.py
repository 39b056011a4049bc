"""Everything a model and its optimizer keep in RAM, unit by unit, in one arena.

Per trainable element in bf16 precision: 2 bytes of `hi` (streamed), 2 of `lo`, 8 of moments, 2 of gradient.
Elements kept in fp32 have no `lo`: 4 bytes streamed, 8 of moments, 4 of gradient. Moments in bf16 take 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.host import halves
from megatrain.host.arena import Arena, ArenaReport
from megatrain.host.arena import footprint as arena_footprint
from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.layout import Entry


@dataclass(frozen=True)
class _Block:
    """A piece of a unit's state: which field it is and what it takes."""

    field: str
    purpose: str
    nbytes: int
    pinned: bool


def _blocks(unit: Unit, *, training: bool, moments: torch.dtype) -> Iterator[_Block]:
    layout = unit.layout
    yield _Block("hi", "weights", layout.nbytes, True)
    yield _Block("lo", "weights_low", 2 * layout.bf16_elems, False)
    if training:
        yield _Block("grad", "gradients", layout.param_bytes, True)
        yield _Block("moments", "optimizer", 2 * moments.itemsize * layout.elems, False)


def footprint(
    anatomy: Anatomy,
    *,
    extra_pinned_bytes: int = 0,
    training: bool = True,
    moments: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Bytes by purpose that `HostStore.allocate` takes, from the very list that it allocates."""
    sizes = {"weights": 0, "weights_low": 0, "gradients": 0, "optimizer": 0}
    for unit in anatomy.units:
        for block in _blocks(unit, training=training, moments=moments):
            sizes[block.purpose] += arena_footprint(block.nbytes, pinned=block.pinned)
    return sizes | {"extra": arena_footprint(extra_pinned_bytes, pinned=True)}


@dataclass
class HostUnit:
    """One unit's state. All tensors are views of the arena but `steps`, which is tiny."""

    unit: Unit
    hi: Tensor  # uint8 [layout.nbytes]: the streamed block, buffers included; page-locked
    lo: Tensor  # int16 [layout.bf16_elems]
    moments: Tensor  # uint8: the two moments, one behind the other
    exp_avg: Tensor  # fp32 or bf16 [layout.elems]: the first of `moments`
    exp_avg_sq: Tensor  # of the same dtype [layout.elems]: the second
    grad: Tensor  # uint8 [layout.param_bytes]: the gradient slab; page-locked
    steps: Tensor  # int64 [number of parameters]: AdamW steps each has taken
    version: int = 0  # optimizer updates done

    def streamed(self, entry: Entry) -> Tensor:
        """View of a parameter or buffer as it is streamed: entry.dtype, entry.shape."""
        return self.hi[entry.byte_offset : entry.byte_offset + entry.nbytes].view(entry.dtype).view(entry.shape)

    def low(self, entry: Entry) -> Tensor:
        """View of the low halves of a bf16 parameter: int16, entry.shape."""
        return self.lo[entry.elems].view(entry.shape)

    def master(self, entry: Entry) -> Tensor:
        """Copy of a parameter at full precision: fp32, entry.shape."""
        streamed = self.streamed(entry)
        if entry.dtype is torch.float32:
            return streamed.clone()
        out = torch.empty(entry.shape, dtype=torch.float32)
        halves.join(streamed, self.low(entry), out=out)
        return out

    def set_master(self, entry: Entry, value: Tensor) -> None:
        """Write a parameter. value: fp32, entry.shape."""
        if value.dtype is not torch.float32 or tuple(value.shape) != entry.shape:
            raise ValueError(f"{entry.name} is fp32 {entry.shape}, not {value.dtype} {tuple(value.shape)}")
        if entry.dtype is torch.float32:
            self.streamed(entry).copy_(value)
        else:
            halves.split(value.contiguous(), hi=self.streamed(entry), lo=self.low(entry))


@dataclass(frozen=True)
class HostStore:
    """All units in store order. Owns the arena."""

    units: tuple[HostUnit, ...]
    arena: Arena

    @classmethod
    def allocate(
        cls,
        anatomy: Anatomy,
        *,
        pin: bool,
        threads: int,
        extra_pinned_bytes: int = 0,
        training: bool = True,
        moments: torch.dtype = torch.float32,
    ) -> HostStore:
        """Take the memory, all zero. `extra_pinned_bytes` stay free in the arena for `take`
        (of whole pages: `arena.footprint`).

        training=False leaves gradients and moments out (empty tensors): enough to load and export.
        moments: what the optimizer's two moments are stored in, fp32 or bf16.
        Raises DoesNotFit when RAM cannot be had.
        """
        pinned = arena_footprint(extra_pinned_bytes, pinned=True)
        pageable = 0
        for unit in anatomy.units:
            for block in _blocks(unit, training=training, moments=moments):
                nbytes = arena_footprint(block.nbytes, pinned=block.pinned)
                pinned, pageable = (pinned + nbytes, pageable) if block.pinned else (pinned, pageable + nbytes)
        arena = Arena(pinned_bytes=pinned, pageable_bytes=pageable, threads=threads, pin=pin)
        taken: dict[int, dict[str, Tensor]] = {unit.index: {} for unit in anatomy.units}
        for locked in (True, False):  # page-locked blocks first: only between the two kinds is a page lost
            for unit in anatomy.units:
                for block in _blocks(unit, training=training, moments=moments):
                    if block.pinned is locked:
                        taken[unit.index][block.field] = arena.take(block.nbytes, pinned=locked)
        arena.settle()
        return cls(tuple(_host_unit(unit, taken[unit.index], moments=moments) for unit in anatomy.units), arena)

    @property
    def stem(self) -> HostUnit:
        return self.units[0]

    @property
    def layers(self) -> tuple[HostUnit, ...]:
        return self.units[1:-1]

    @property
    def tail(self) -> HostUnit:
        return self.units[-1]

    @property
    def report(self) -> ArenaReport:
        return self.arena.report

    def close(self) -> None:
        """Unlock the pages; no copy may be in flight."""
        self.arena.close()


def _host_unit(unit: Unit, blocks: dict[str, Tensor], *, moments: torch.dtype) -> HostUnit:
    empty = torch.empty(0, dtype=torch.uint8)
    both = blocks.get("moments", empty)
    exp_avg, exp_avg_sq = both.view(moments).chunk(2) if both.numel() else (both.view(moments), both.view(moments))
    return HostUnit(
        unit=unit,
        hi=blocks["hi"],
        lo=blocks["lo"].view(torch.int16),
        moments=both,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        grad=blocks.get("grad", empty),
        steps=torch.zeros(len(unit.layout.params), dtype=torch.int64),
    )
