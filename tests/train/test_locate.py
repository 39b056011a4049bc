"""The rows that are named when a step is not finite are those that were in it."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.data.loader import Loader
from megatrain.data.samples import SamplesBuilder


@pytest.mark.parametrize("packing", [True, False])
def test_the_rows_of_a_micro_batch_are_named_by_file_and_number(packing: bool) -> None:
    """Row k of the file is k tokens, all of them k."""
    builder = SamplesBuilder()
    for row in range(1, 13):
        tokens = np.full(row, row, np.int32)
        builder.add([(tokens, np.ones(row, np.bool_))], source=0, file="rows with space.jsonl", row=row)
    loader = Loader(
        builder.build(weights=(1.0,), pad_id=0), batch_size=5, max_seq_len=16, packing=packing, shuffle=True, seed=3
    )
    seen = []
    for index in range(loader.steps_in_epoch(0)):
        step = loader.step_batch(0, index)
        parts = step.micro_batches(2)
        origins = step.origins(2)
        assert len(parts) == len(origins)
        for part, names in zip(parts, origins, strict=True):
            inside = set(part.input_ids[part.labels >= 0].tolist())
            assert set(names) == {f"rows with space.jsonl: row {k}" for k in inside}
            seen += names
    assert len(seen) == len(set(seen)) == 12
