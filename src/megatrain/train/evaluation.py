"""The rows of an evaluation, in groups that one sweep over the layers takes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from megatrain.data.loader import Loader
from megatrain.data.prepare import Prepared
from megatrain.model.batch import MicroBatch
from megatrain.plan.memory import MemoryPlan
from megatrain.recipe import Recipe


class EvaluationGroups(Sequence[Sequence[MicroBatch]]):
    """Evaluation rows in the order of the files, made when they are asked for."""

    def __init__(self, loader: Loader, *, rows: int) -> None:
        self._loader, self._rows = loader, rows

    def __len__(self) -> int:
        return self._loader.steps_in_epoch(0)

    @overload
    def __getitem__(self, index: int) -> Sequence[MicroBatch]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sequence[MicroBatch]]: ...
    def __getitem__(self, index: int | slice) -> Sequence[MicroBatch] | Sequence[Sequence[MicroBatch]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._loader.step_batch(0, index).micro_batches(self._rows)


def evaluation_groups(
    prepared: Prepared, *, recipe: Recipe, plan: MemoryPlan, pad_multiple: int
) -> Sequence[Sequence[MicroBatch]]:
    """What `prepared` holds out, empty if it holds out nothing."""
    if prepared.eval is None:
        return ()
    loader = Loader(
        prepared.eval,
        batch_size=plan.micro_batch * plan.micro_batches,
        max_seq_len=recipe.data.max_seq_len,
        packing=recipe.data.packing,
        shuffle=False,
        seed=recipe.train.seed,
        pad_multiple=pad_multiple,
    )
    return EvaluationGroups(loader, rows=plan.micro_batch)
