"""The steps of an epoch: what they hold, how they are padded, and that (seed, epoch, index) says it all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from megatrain.data import Loader, Samples
from megatrain.data.samples import SamplesBuilder
from megatrain.model.batch import IGNORE

PAD = 999


def samples(*lengths: int, weights: tuple[float, ...] = (1.0,), source: list[int] | None = None) -> Samples:
    """Document i is so many tokens, i * 1000 + position; every second one is supervised, never the first."""
    builder = SamplesBuilder()
    for i, length in enumerate(lengths):
        tokens = (1000 * i + np.arange(length)).astype(np.int32)
        builder.add([(tokens, np.arange(length) % 2 == 1)], source=source[i] if source else 0, file="f", row=i + 1)
    return builder.build(weights=weights, pad_id=PAD)


def loader(data: Samples, **options: object) -> Loader:
    chosen = {"batch_size": 3, "max_seq_len": 16, "packing": True, "shuffle": True, "seed": 0, **options}
    return Loader(data, **chosen)  # type: ignore[arg-type]


def documents(batches: Loader, *, epoch: int = 0) -> list[list[int]]:
    """The documents of each row of an epoch."""
    steps = [batches.step_batch(epoch, i) for i in range(batches.steps_in_epoch(epoch))]
    return [row.tolist() for step in steps for row in step.rows]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_document_once(packing: bool, shuffle: bool) -> None:
    data = samples(*[3, 5, 16, 7, 2, 9, 11] * 5)
    batches = loader(data, packing=packing, shuffle=shuffle)
    for epoch in (0, 1, 7):
        rows = documents(batches, epoch=epoch)
        assert sorted(i for row in rows for i in row) == list(range(35))
        assert len(rows) == batches.rows_in_epoch(epoch)
        assert batches.tokens_in_epoch(epoch) == data.token_count


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    data = samples(*[3, 5, 16, 7, 2, 9, 11] * 5)
    first = loader(data)
    walked = [documents(first, epoch=epoch) for epoch in range(4)]
    assert [documents(loader(data), epoch=epoch) for epoch in (3, 0)] == [walked[3], walked[0]]
    assert documents(first, epoch=1) == walked[1]
    assert len({str(rows) for rows in walked}) == 4
    assert documents(loader(data, seed=1)) != walked[0]


def test_the_order_is_the_same_on_every_machine() -> None:
    batches = loader(samples(*[4] * 10), packing=False, seed=123)
    assert [row[0] for row in documents(batches, epoch=2)] == [9, 4, 5, 0, 3, 1, 8, 7, 2, 6]


def test_without_shuffle_rows_keep_their_order() -> None:
    batches = loader(samples(*[3, 9, 4, 16, 2]), packing=False, shuffle=False)
    assert documents(batches, epoch=3) == [[0], [1], [2], [3], [4]]
    assert documents(loader(samples(*[3, 9, 4, 16, 2]), shuffle=False)) == [[0, 1, 2], [3], [4]]


def test_the_last_step_may_be_smaller_and_is_a_real_one() -> None:
    batches = loader(samples(*[4] * 7), packing=False)
    assert batches.steps_in_epoch(0) == 3
    assert [len(batches.step_batch(0, i).rows) for i in range(3)] == [3, 3, 1]
    with pytest.raises(IndexError, match="epoch 0 has 3 steps, not 4"):
        batches.step_batch(0, 3)
    few = loader(samples(4, 4, 4), packing=False, batch_size=8)
    assert (few.steps_in_epoch(0), len(few.step_batch(0, 0).rows)) == (1, 3)


def test_weights_multiply_how_often_rows_are_drawn() -> None:
    data = samples(*[4] * 30, weights=(2.0, 0.5, 1.3), source=[i // 10 for i in range(30)])
    batches = loader(data, packing=False)
    counts = Counter(row[0] for row in documents(batches))
    drawn = [sum(counts[i] for i in range(s, s + 10)) for s in (0, 10, 20)]
    assert drawn == [20, 5, 13]
    assert {counts[i] for i in range(10)} == {2}
    assert {counts[i] for i in range(10, 20)} == {0, 1}
    assert {counts[i] for i in range(20, 30)} == {1, 2}
    others = [{i for i in range(10, 20) if Counter(r[0] for r in documents(batches, epoch=e))[i]} for e in range(4)]
    assert len({frozenset(o) for o in others}) > 1


def test_packed_rows_restart_their_positions_and_pad_as_a_document_of_its_own() -> None:
    batches = loader(samples(5, 4, 6, 16), shuffle=False)
    (micro,) = batches.step_batch(0, 0).micro_batches(8)
    assert micro.packed
    assert micro.attention_mask is not None  # for the router loss
    assert int(micro.attention_mask.sum()) == micro.tokens
    assert micro.input_ids.shape == (2, 16)
    row = [*range(5), *range(1000, 1004), *range(2000, 2006), PAD]
    assert micro.input_ids[0].tolist() == row
    assert micro.position_ids is not None
    assert micro.position_ids[0].tolist() == [*range(5), *range(4), *range(6), 0]
    supervised = [1, 3, 1001, 1003, 2001, 2003, 2005]
    assert micro.labels[0].tolist() == [token if token in supervised else IGNORE for token in row]
    assert micro.position_ids[1].tolist() == list(range(16))
    assert (micro.tokens, micro.supervised) == (31, 15)


@pytest.mark.parametrize("packing", [True, False])
def test_no_document_begins_with_a_label_and_padding_has_none(packing: bool) -> None:
    batches = loader(samples(*[3, 5, 16, 7, 2, 9, 11] * 5), packing=packing)
    for index in range(batches.steps_in_epoch(0)):
        for micro in batches.step_batch(0, index).micro_batches(2):
            labelled = micro.labels != IGNORE
            assert not labelled[micro.input_ids % 1000 == 0].any()
            assert not labelled[micro.input_ids == PAD].any()
            assert torch.equal(micro.labels[labelled], micro.input_ids[labelled])
            assert int(labelled.sum()) == micro.supervised
            assert int((micro.input_ids != PAD).sum()) == micro.tokens


def test_unpacked_rows_are_padded_on_the_right_to_the_longest_of_the_micro_batch() -> None:
    batches = loader(samples(3, 7, 7, 5, 2), packing=False, shuffle=False, batch_size=5)
    first, second, third = batches.step_batch(0, 0).micro_batches(2)
    assert first.input_ids.tolist() == [list(range(1000, 1007)), list(range(2000, 2007))]
    assert first.attention_mask is None
    assert first.position_ids is None
    assert second.input_ids.tolist() == [list(range(3000, 3005)), [0, 1, 2, PAD, PAD]]
    assert second.attention_mask is not None
    assert second.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert third.input_ids.tolist() == [[4000, 4001]]


@pytest.mark.parametrize(("multiple", "widths"), [(1, [7, 2]), (4, [8, 4]), (64, [16, 16])])
def test_padding_may_be_rounded_up_but_not_beyond_max_seq_len(multiple: int, widths: list[int]) -> None:
    batches = loader(samples(7, 2), packing=False, shuffle=False, pad_multiple=multiple)
    micros = batches.step_batch(0, 0).micro_batches(1)
    assert [m.input_ids.shape[1] for m in micros] == widths
    assert [m.attention_mask is None for m in micros] == [m.tokens == w for m, w in zip(micros, widths, strict=True)]


@pytest.mark.parametrize("packing", [True, False])
def test_cutting_a_step_into_micro_batches_changes_nothing_but_the_cut(packing: bool) -> None:
    step = loader(samples(*[3, 5, 16, 7, 2, 9, 11] * 5), packing=packing, batch_size=7).step_batch(0, 0)
    whole = Counter(t for m in step.micro_batches(7) for t in m.input_ids.flatten().tolist() if t != PAD)
    for rows in (1, 2, 3, 100):
        micros = step.micro_batches(rows)
        assert Counter(t for m in micros for t in m.input_ids.flatten().tolist() if t != PAD) == whole
        assert sum(m.tokens for m in micros) == step.tokens == whole.total()
        assert sum(m.supervised for m in micros) == step.supervised
        assert all(len(m.input_ids) <= rows for m in micros)


def test_tensors_have_the_dtype_that_models_want() -> None:
    (micro,) = loader(samples(5, 4)).step_batch(0, 0).micro_batches(1)
    assert micro.position_ids is not None
    assert {t.dtype for t in (micro.input_ids, micro.labels, micro.position_ids)} == {torch.int64}
