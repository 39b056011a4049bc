"""The rows of the embedding that a step reads: gathered on the host on their way in, scattered there on their way home.

One page-locked block [U, D] serves both ways, U being the distinct tokens of a step. The waits, all of them:

* *no fetch before update*: the ring asks for the rows only when the optimizer is done with the stem;
* *no gather before the rows are fetched*: the host waits for the copy of last time before it writes the block again;
* *no gather before the rows are home*: nor may last step's gradient, which nobody may ever have read, still arrive;
* *no update before the gradient is home*: the optimizer's thread waits for the block, then scatters it.

The gradient that the optimizer sees is the whole one: rows that no token of the step has are zero in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.host.store import HostUnit
from megatrain.model.batch import MicroBatch
from megatrain.model.layout import Entry
from megatrain.stream.device import Device, Event, StreamName
from megatrain.stream.grads import Run

ROWS_ON_HOST = "rows on host"
"""What the block is called where accesses are checked."""


class EmbeddingRows:
    """Which rows a step reads, and the block they travel through."""

    def __init__(self, host: HostUnit, *, name: str, block: Tensor, device: Device, filled_by_others: bool) -> None:
        """block: uint8, page-locked, room for the most rows of a step. filled_by_others: all rows of the slab are
        written in every step (by the slices of a tied head), so none has to be cleared."""
        self.entry: Entry = host.unit.layout.entry(name)
        self._host, self._device, self._block, self._filled = host, device, block, filled_by_others
        self._row_bytes = self.entry.nbytes // self.entry.shape[0]
        self.capacity = block.numel() // self._row_bytes
        self.ids = torch.empty(0, dtype=torch.int64)  # [U], ascending, on the CPU
        self._cleared = self.ids  # rows of the slab that were written last; only the optimizer's thread knows them
        self._home: Event = device.event("rows.home")

    def choose(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Decide the rows of a step. Returns the table token -> row, int64 [V], -1 where there is none, on the CPU."""
        seen = self._seen(batches)
        self.ids = seen.nonzero().flatten()
        if len(self.ids) > self.capacity:
            raise ValueError(f"{len(self.ids)} distinct tokens in a step that was planned for {self.capacity}")
        return (seen.cumsum(0) - 1).masked_fill_(~seen, -1)

    def hold(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether there is room for all rows that the batches read."""
        return sum(batch.input_ids.numel() for batch in batches) <= self.capacity or (
            int(self._seen(batches).sum()) <= self.capacity
        )

    def _seen(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Which tokens the batches have: bool [V]."""
        seen = torch.zeros(self.entry.shape[0], dtype=torch.bool)
        for batch in batches:
            seen[batch.input_ids.flatten()] = True
        return seen

    def row_of(self, token: int | None) -> int | None:
        """The row of a token in this step; None if no batch has it."""
        if token is None:
            return None
        place = int(torch.searchsorted(self.ids, token))
        return place if place < len(self.ids) and int(self.ids[place]) == token else None

    def span(self, first: int, last: int) -> slice:
        """The rows of the step's tokens first <= token < last, which lie side by side."""
        start, stop = torch.searchsorted(self.ids, torch.tensor([first, last])).tolist()
        return slice(start, stop)

    def gather(self, *, fetched: Event) -> Tensor:
        """The chosen rows as they are now: uint8 bytes of the block. fetched: the copy of last time is done."""
        self._device.host_wait(fetched, keeps="no gather before the rows are fetched")
        self._device.host_wait(self._home, keeps="no gather before the rows are home")
        reads = (f"host{self._host.unit.index}",)
        self._device.touch("gather", on=StreamName.HOST, reads=reads, writes=(ROWS_ON_HOST,))
        block = self._block[: len(self.ids) * self._row_bytes]
        torch.index_select(self._host.streamed(self.entry), 0, self.ids, out=self._typed(block))
        return block

    def run(self, sums: Tensor) -> Run:
        """The way home of the rows' gradient. sums: fp32 [at least U, D]."""
        target = self._block[: len(self.ids) * self._row_bytes]
        return Run(self.entry.dtype, sums[: len(self.ids)].flatten(), target, ROWS_ON_HOST)

    def scatter(self, *, home: Event) -> Scatter:
        """What the optimizer's thread does before the update of the unit. home: the gradient is in the block."""
        self._home = home
        return Scatter(self, ids=self.ids, home=home)

    def write_slab(self, ids: Tensor) -> None:
        """Put the rows that came home into the gradient slab."""
        writes = (f"slab{self._host.unit.index}",)
        self._device.touch("scatter", on=StreamName.HOST, reads=(ROWS_ON_HOST,), writes=writes)
        slab = self._host.grad[self.entry.bytes].view(self.entry.dtype).view(self.entry.shape)
        if not self._filled:
            slab.index_fill_(0, self._cleared, 0.0)
        slab[ids] = self._typed(self._block[: len(ids) * self._row_bytes])
        self._cleared = ids

    def _typed(self, block: Tensor) -> Tensor:
        return block.view(self.entry.dtype).view(-1, self.entry.shape[1])

    def wait(self, home: Event) -> None:
        self._device.host_wait(home, keeps="no update before the gradient is home")


class Scatter:
    """The wait for a gradient of which rows must be put into place first. Called again it does nothing."""

    def __init__(self, rows: EmbeddingRows, *, ids: Tensor, home: Event) -> None:
        self._rows, self._ids, self._home = rows, ids, home
        self._done = False

    def __call__(self) -> None:
        if not self._done:
            self._rows.wait(self._home)
            self._rows.write_slab(self._ids)
            self._done = True
