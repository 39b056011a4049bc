"""Spare device memory: which units stay there, which graphs are kept, and that nothing else changes for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.cutting import attempt
from megatrain.plan.spend import SPEND_SHARE
from plan.jobs import GIB, HALF_B, SEVEN_B, TINY, job, limits

CEILINGS = [13, 16, 20, 24, 32, 40, 48, 64, 80, 96, 120, 126, 140, 160, 180, 200]


def test_units_become_resident_first_needed_first_as_far_as_the_ceiling_goes() -> None:
    counts: dict[str, list[int]] = {"host": [], "device": []}
    for gib in CEILINGS:
        chosen = attempt(job(stem_shared=False, vram=gib * GIB, limits=limits(256 * GIB, vram=282 * GIB)))
        assert chosen.fits
        without = attempt(
            job(vram=gib * GIB, limits=limits(256 * GIB, vram=282 * GIB), can_reside=False, stem_shared=False)
        )
        same = ("micro_batch", "micro_batches", "activations", "head_chunk", "load_buffers", "threads")
        assert all(getattr(chosen, name) == getattr(without, name) for name in same)
        if chosen.resident:
            assert chosen.device_total <= gib * GIB * SPEND_SHARE
        counts[chosen.activations].append(chosen.resident)
    assert counts["host"][0] == 0
    assert all(found == sorted(found) and len(found) > 2 for found in counts.values())
    assert counts["device"][-1] == 30


@pytest.mark.parametrize("moment_bytes", [4, 2])
def test_a_resident_layer_takes_masters_moments_and_a_gradient(moment_bytes: int) -> None:
    some = attempt(job(vram=40 * GIB, moment_bytes=moment_bytes))
    assert 1 < some.resident < 29
    layer, stem = SEVEN_B.layers[0].elems, SEVEN_B.stem.elems
    per_layer, of_stem = 2 + 2 + 2 * moment_bytes + 2, 2 + 2 * moment_bytes + 2
    assert some.device["resident units"] == per_layer * layer * (some.resident - 1) + of_stem * stem
    assert some.slots == 2
    assert some.device["weight slots"] == 2 * SEVEN_B.layers[0].streamed_bytes


def test_where_all_layers_are_resident_slots_and_staging_go() -> None:
    everything = attempt(job(HALF_B, batch=8))
    assert everything.resident == 26
    assert (everything.slots, everything.grad_buffers) == (0, 0)
    assert everything.device["weight slots"] == everything.device["gradient buffers"] == 0
    smaller = (attempt(job(HALF_B, batch=8, vram=ceiling)) for ceiling in range(16 * GIB, 10 * GIB, -GIB // 4))
    tail_streams = next(p for p in smaller if p.resident < 26)
    assert tail_streams.resident == 25
    assert (tail_streams.slots, tail_streams.grad_buffers) == (0, 2)


def test_one_layer_that_streams_needs_one_slot() -> None:
    plans = {
        p.resident: p
        for p in (attempt(job(TINY, vram=n, batch=4, seq=64)) for n in range(670 << 20, 720 << 20, 1 << 17))
    }
    assert plans[4].slots == 1
    assert plans[3].slots == 2


def test_graphs_are_kept_only_when_all_units_are_resident() -> None:
    kept = []
    for gib in CEILINGS:
        chosen = attempt(job(HALF_B, batch=32, vram=gib * GIB))
        kept.append(chosen.kept)
        if chosen.kept:
            assert chosen.resident == 26
            assert chosen.activations == "device"
            assert chosen.device["kept graphs"] == chosen.kept * HALF_B.saved_bytes_per_token * 32 * 2048
    assert kept == sorted(kept)
    assert kept[-1] == 24


def test_no_graph_is_kept_where_inputs_wait_on_the_host() -> None:
    chosen = attempt(job(HALF_B, batch=8, activations="host"))
    assert chosen.resident == 26
    assert chosen.kept == 0


def test_without_a_kernel_for_it_nothing_is_resident() -> None:
    chosen = attempt(job(HALF_B, can_reside=False))
    assert (chosen.resident, chosen.kept, chosen.slots) == (0, 0, 2)


def test_on_the_cpu_spare_host_memory_can_be_spent_the_same_way() -> None:
    chosen = attempt(job(TINY, limits=limits(16 * GIB, vram=None), batch=4, seq=64))
    assert chosen.resident == 6
    assert chosen.kept == 4
    assert chosen.host_total <= 16 * GIB * SPEND_SHARE


def test_a_resumed_run_keeps_its_cut_and_not_its_residents() -> None:
    before = attempt(job(HALF_B, batch=8, vram=8 * GIB))
    after = attempt(job(HALF_B, batch=8, resumed=before))
    assert (after.micro_batch, after.head_chunk) == (before.micro_batch, before.head_chunk)
    assert after.resident > before.resident


def test_a_plan_of_before_there_were_residents_is_read() -> None:
    chosen = attempt(job(HALF_B))
    values = json.loads(json.dumps(chosen.to_dict()))
    assert MemoryPlan.from_dict(values) == chosen
    del values["resident"], values["kept"]
    assert MemoryPlan.from_dict(values) == replace(chosen, resident=0, kept=0)


def test_a_resumed_run_keeps_no_more_graphs_than_before() -> None:
    fresh = attempt(job(HALF_B, batch=8))
    assert fresh.kept > 2
    for before in (0, 2, fresh.kept):
        assert attempt(job(HALF_B, batch=8, resumed=replace(fresh, kept=before))).kept == before
