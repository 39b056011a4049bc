"""Two documents in one row against the two apart: the summed loss and every gradient, for every attention backend."""

from __future__ import annotations

import pytest
from cases import APART, DOCUMENT, LEAKING
from drive import Streamed, differences, make_batches, reference_model
from variants import DEFAULT, EAGER_ONLY, attention_of, config_of

from megatrain.model.attention import VARLEN
from megatrain.model.batch import IGNORE, MicroBatch

IN_VARLEN = ("llama", "qwen2", "qwen3", "mixtral")
"""Of the default variants, those whose attention our varlen kernel does; the others fall back to masks."""
CASES = [
    *((variant, attention_of(variant)) for variant in DEFAULT if variant not in LEAKING),
    *((variant, "eager") for variant in DEFAULT if variant not in LEAKING | set(EAGER_ONLY)),
    *((variant, VARLEN) for variant in IN_VARLEN),
]


def apart(row: MicroBatch) -> list[MicroBatch]:
    """The documents of a packed batch, each with others of its length."""
    parts = []
    for part in (slice(None, DOCUMENT), slice(DOCUMENT, None)):
        ids, labels = row.input_ids[:, part], row.labels[:, part]
        parts.append(MicroBatch(ids, labels, None, None, ids.numel(), int((labels != IGNORE).sum())))
    return parts


@pytest.mark.parametrize(("variant", "attention"), CASES)
def test_loss_and_gradients_packed_are_those_apart(variant: str, attention: str) -> None:
    config = config_of(variant)
    model = reference_model(config, attention="sdpa" if attention == VARLEN else attention)
    streamed = Streamed(model, config=config, attention=attention, packing=True)
    assert streamed.model.attention == attention
    (row,) = make_batches(1, packed=True)
    separate = streamed.step(apart(row))
    packed = streamed.step([row])
    assert sum(part.supervised for part in apart(row)) == row.supervised
    assert len(packed.gradients) > 10
    for name, gap in differences(packed, separate).items():
        largest = float(separate.gradients[name].abs().max()) if name != "loss" else float(separate.loss)
        assert gap <= APART * max(1.0, largest), name
