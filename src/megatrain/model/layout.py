"""The only offset arithmetic of the project: where each tensor of a unit lies in one flat block.

A *unit* is what moves together: the stem, one decoder layer, or the tail. Its trainable parameters are
laid out twice over the same order: in *elements* (fp32 sums, moments, `lo` halves) and in *bytes* as
streamed (weights and gradients in their streamed dtype). bf16 parameters come first, then fp32 ones, so
each dtype is one contiguous run; persistent buffers follow the parameters in the byte layout only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGN_ELEMS = 128
"""Every tensor starts at a multiple of this many elements: 256 bytes in bf16, 512 in fp32."""
ALIGN_BYTES = 256
STREAMED_DTYPES = (torch.bfloat16, torch.float32)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class TensorSpec:
    """A tensor before it has a place: its name in the unit, shape and streamed dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool  # a parameter; False: a persistent buffer that travels with its layer


@dataclass(frozen=True)
class Entry:
    """A tensor with its place. `elem_offset` is -1 for buffers, which have neither gradient nor moments."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    numel: int
    elem_offset: int
    byte_offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def elems(self) -> slice:
        return slice(self.elem_offset, self.elem_offset + self.numel)

    @property
    def bytes(self) -> slice:
        """Its bytes in a streamed block or, of a parameter, in a gradient slab."""
        return slice(self.byte_offset, self.byte_offset + self.nbytes)

    def rows(self, first: int, last: int) -> slice:
        """The bytes of rows [first, last) of a matrix."""
        width = self.nbytes // self.shape[0]
        return slice(self.byte_offset + first * width, self.byte_offset + last * width)


@dataclass(frozen=True)
class FlatLayout:
    """Places of a unit's tensors. Padding between them is zero and stays zero (zero weight, zero gradient)."""

    entries: tuple[Entry, ...]  # parameters (bf16, then fp32), then buffers
    bf16_elems: int  # elements [0, bf16_elems) are bf16 parameters
    elems: int  # elements [bf16_elems, elems) are fp32 parameters
    nbytes: int  # of the streamed block, buffers included

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> FlatLayout:
        """Lay `specs` out in the given order. Raises ValueError on a parameter dtype that is not streamed."""
        specs = list(specs)
        params = [s for s in specs if s.trainable]
        for spec in params:
            if spec.dtype not in STREAMED_DTYPES:
                raise ValueError(f"parameter {spec.name} has dtype {spec.dtype}; only bf16 and fp32 are streamed")
        entries: list[Entry] = []
        elem = byte = bf16_elems = 0
        for dtype in STREAMED_DTYPES:
            for spec in (s for s in params if s.dtype is dtype):
                numel = torch.Size(spec.shape).numel()
                entries.append(Entry(spec.name, spec.shape, dtype, True, numel, elem, byte))
                elem += _round_up(numel, ALIGN_ELEMS)
                byte += _round_up(numel, ALIGN_ELEMS) * dtype.itemsize
            if dtype is torch.bfloat16:
                bf16_elems = elem
        for spec in (s for s in specs if not s.trainable):
            numel = torch.Size(spec.shape).numel()
            entries.append(Entry(spec.name, spec.shape, spec.dtype, False, numel, -1, byte))
            byte += _round_up(numel * spec.dtype.itemsize, ALIGN_BYTES)
        return cls(tuple(entries), bf16_elems, elem, byte)

    @cached_property
    def params(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.trainable)

    @cached_property
    def buffers(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if not e.trainable)

    def entry(self, name: str) -> Entry:
        """The entry of that name. Raises StopIteration if there is none."""
        return next(e for e in self.entries if e.name == name)

    def without(self, *names: str) -> FlatLayout:
        """The layout of the other tensors, closed up: in the same order, each aligned as it was."""
        rest = (e for e in self.entries if e.name not in names)
        return FlatLayout.of(TensorSpec(e.name, e.shape, e.dtype, e.trainable) for e in rest)

    def around(self, *names: str) -> tuple[slice, ...]:
        """The bytes of a streamed block without some parameters; end to end they are a block of `without(*names)`."""
        parts, start = [], 0
        for gap in (e for e in self.params if e.name in names):  # in the order of the block
            parts.append(slice(start, gap.byte_offset))
            start = gap.byte_offset + _round_up(gap.numel, ALIGN_ELEMS) * gap.dtype.itemsize
        parts.append(slice(start, self.nbytes))
        return tuple(part for part in parts if part.start < part.stop)

    @property
    def bf16_bytes(self) -> int:
        return 2 * self.bf16_elems

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters as streamed; a gradient slab has exactly this size and layout."""
        return 2 * self.bf16_elems + 4 * (self.elems - self.bf16_elems)

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """Typed views into a streamed block. block: uint8 [>= nbytes] (or >= param_bytes if there are no buffers)."""
        return {
            e.name: block[e.byte_offset : e.byte_offset + e.nbytes].view(e.dtype).view(e.shape) for e in self.entries
        }

    def param_views(self, block: Tensor) -> dict[str, Tensor]:
        """Typed views of the parameters only: of a streamed block or a gradient slab, uint8 [>= param_bytes]."""
        return {
            e.name: block[e.byte_offset : e.byte_offset + e.nbytes].view(e.dtype).view(e.shape) for e in self.params
        }

    def elem_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the parameters into a per-element tensor (fp32 sums, moments). flat: [>= elems]."""
        return {e.name: flat[e.elems].view(e.shape) for e in self.params}

    def bf16_part(self, block: Tensor) -> Tensor:
        """The bf16 run of a streamed block or slab: bf16 [bf16_elems]."""
        return block[: self.bf16_bytes].view(torch.bfloat16)

    def fp32_part(self, block: Tensor) -> Tensor:
        """The fp32 run of a streamed block or slab: fp32 [elems - bf16_elems]."""
        return block[self.bf16_bytes : self.param_bytes].view(torch.float32)
