"""Attention kept for the backward: where it is worth it, where it waits, and what that takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.host.pages import footprint
from megatrain.plan.accounting import LOAD_BUFFERS, SENDS_IN_FLIGHT
from megatrain.plan.attention import PIECE_BYTES, with_attention
from megatrain.plan.cutting import attempt
from megatrain.plan.explain import explain
from megatrain.plan.job import Job
from megatrain.plan.rates import assumed_rates
from megatrain.plan.speed import estimate
from megatrain.plan.spend import SPEND_SHARE
from megatrain.stream import activations
from megatrain.train.build import build_executor, build_rooms
from megatrain.train.model_config import read_config
from megatrain.train.planning import Planned, plan_run
from megatrain.train.replan import fewer_rows
from plan.jobs import GIB, SEVEN_B, job, limits
from plan.test_allocations import BUFFERS, STORE, Counting, recipe_of

EACH = 7280  # of 28 heads of 128: output in bf16 and a log-sum-exp
SHAPE = replace(SEVEN_B, attention_bytes_per_token=EACH, attention_layers=28, widest_bytes_per_token=37_888)
ROOMY = limits(512 * GIB)


def test_pieces_begin_where_the_store_puts_them() -> None:
    assert activations.PIECE_BYTES == PIECE_BYTES


@pytest.mark.parametrize(
    ("seq", "packed", "kept"),
    [(1024, False, False), (4096, False, False), (8192, False, True), (16_384, True, False), (65_536, True, True)],
)
def test_it_is_kept_for_long_rows(seq: int, packed: bool, kept: bool) -> None:
    chosen = attempt(job(SHAPE, batch=65_536 // seq, seq=seq, packed=packed, vram=40 * GIB, limits=ROOMY))
    assert bool(chosen.attention) is kept


def test_it_waits_on_the_host_where_units_stream_and_takes_what_it_takes() -> None:
    chosen = attempt(job(SHAPE, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    plain = attempt(job(SEVEN_B, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    assert chosen.attention == "host"
    assert chosen.attention_bytes == chosen.micro_batch * 16_384 * EACH + PIECE_BYTES
    assert chosen.micro_batch == plain.micro_batch
    rows = 28 * chosen.micro_batches
    assert chosen.host["attention outputs"] == rows * footprint(chosen.attention_bytes, pinned=True)
    assert chosen.device["attention outputs"] == (LOAD_BUFFERS + SENDS_IN_FLIGHT) * chosen.attention_bytes
    assert chosen.pinned_bytes - plain.pinned_bytes == chosen.host["attention outputs"]
    assert any("what attention gave waits in host memory" in line for line in explain(chosen, job=job(SHAPE)))


def test_it_waits_on_the_device_where_the_host_has_no_room() -> None:
    job_ = job(SHAPE, batch=4, seq=16_384, vram=48 * GIB)
    least = attempt(job_).host_total
    short = replace(job_, limits=limits(host=least + 2 * GIB))
    chosen = attempt(short)
    assert chosen.attention == "device"
    assert chosen.device["attention outputs"] == 28 * chosen.micro_batches * chosen.attention_bytes


@pytest.mark.parametrize("where", ["device", "host"])
def test_it_waits_where_activations_are_to_wait(where: str) -> None:
    for vram in (48, 80):
        chosen = attempt(job(SHAPE, batch=4, seq=16_384, vram=vram * GIB, limits=ROOMY, activations=where))
        assert chosen.attention == where
        assert chosen.activations == where


def test_it_is_not_kept_beside_every_graph() -> None:
    few = replace(SHAPE, layers=SHAPE.layers[:4])
    chosen = attempt(job(few, batch=1, seq=16_384, limits=ROOMY))
    assert chosen.kept == 4
    assert not chosen.attention


def test_spare_memory_stops_where_it_stops_for_all_else() -> None:
    seen = set()
    for gib in range(14, 64, 2):
        chosen = attempt(job(SHAPE, batch=4, seq=16_384, vram=gib * GIB, limits=ROOMY))
        seen.add(chosen.attention)
        if chosen.attention:
            assert chosen.device_total <= gib * GIB * SPEND_SHARE
    assert seen >= {"", "host"}


def test_only_layers_that_see_whole_documents_count() -> None:
    few = attempt(job(replace(SHAPE, attention_layers=5), batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    all_ = attempt(job(SHAPE, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    assert 28 * few.host["attention outputs"] == 5 * all_.host["attention outputs"]
    rates = assumed_rates("NVIDIA H200", cores=14)
    none = estimate(replace(SHAPE, attention_layers=0), plan=all_, rates=rates, tokens=65_536).link_out_s
    some, every = (
        estimate(replace(SHAPE, attention_layers=count), plan=all_, rates=rates, tokens=65_536).link_out_s
        for count in (5, 28)
    )
    assert 28 * (some - none) == pytest.approx(5 * (every - none))


def test_a_run_that_goes_on_stays_as_it_was() -> None:
    with_it = attempt(job(SHAPE, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    without = attempt(job(SEVEN_B, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    again = job(SHAPE, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY)
    assert attempt(replace(again, resumed=with_it)).attention
    assert not attempt(replace(again, resumed=without)).attention


def test_a_run_that_goes_on_without_our_attention_keeps_none() -> None:
    before = attempt(job(SHAPE, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    assert before.attention
    elsewhere = attempt(job(SEVEN_B, batch=4, seq=16_384, limits=replace(ROOMY, device=None), resumed=before))
    assert not elsewhere.attention
    assert elsewhere.attention_bytes == elsewhere.attention_buffers == 0


def test_the_estimate_leaves_the_recompute_of_attention_out() -> None:
    rates = assumed_rates("NVIDIA H200", cores=14)
    kept = attempt(job(SHAPE, batch=4, seq=16_384, vram=32 * GIB, limits=ROOMY))
    plain = replace(kept, attention="", attention_bytes=0, attention_buffers=0)
    with_it, without = (estimate(SHAPE, plan=p, rates=rates, tokens=65_536) for p in (kept, plain))
    attention = 2.0 * 65_536 * 16_384 * 3584 * 28 / rates.attention_flops
    assert without.recompute_s - with_it.recompute_s == pytest.approx(attention)
    assert with_it.link_out_s > without.link_out_s
    assert with_it.link_in_s > without.link_in_s


def with_keepable_layers(planned: Planned) -> Job:
    """As on a GPU, whose attention can be kept: five layers of four heads of 12."""
    planned.model._keepable = {layer: (4, 12) for layer in range(5)}
    sizes = replace(planned.job.sizes, attention_bytes_per_token=4 * (12 * 2 + 4), attention_layers=5)
    return replace(planned.job, sizes=sizes)


@pytest.mark.parametrize("where", ["device", "host"])
def test_what_is_taken_is_what_was_planned(tmp_path: Path, where: str) -> None:
    device = Counting()
    recipe = recipe_of(tmp_path, {"precision": "bf16", "rows": 4, "micro": 2})
    planned = replace(plan_run(recipe, config=read_config(recipe)), device=device)
    job_ = with_keepable_layers(planned)
    chosen = with_attention(planned.plan, job=job_, where=where)
    rooms = build_rooms(replace(planned, plan=chosen), fill=lambda store: None)
    try:
        purposes = (*STORE, "attention outputs") if where == "host" else STORE
        assert rooms.store.report.total_bytes == sum(chosen.host.get(purpose, 0) for purpose in purposes)
        places = LOAD_BUFFERS * chosen.attention_bytes if where == "host" else 0
        assert device.taken == sum(chosen.device.get(purpose, 0) for purpose in BUFFERS) + places
        assert chosen.attention_bytes == 2 * 64 * 4 * (12 * 2 + 4) + PIECE_BYTES
        rooms.executor.close()
    finally:
        rooms.worker.close()
        rooms.store.close()


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("rows", [2, 1])
def test_out_of_memory_leaves_it_out_and_what_is_left_can_be_built(tmp_path: Path, where: str, rows: int) -> None:
    recipe = recipe_of(tmp_path, {"precision": "bf16", "rows": 4, "micro": rows})
    planned = plan_run(recipe, config=read_config(recipe))
    job_ = with_keepable_layers(planned)
    planned = replace(planned, job=job_, plan=with_attention(planned.plan, job=job_, where=where))
    rooms = build_rooms(planned, fill=lambda store: None)
    try:
        smaller = fewer_rows(planned)
        assert smaller is not None
        assert (smaller.plan.micro_batch, smaller.plan.attention) == (1, "")
        assert "attention outputs" not in smaller.plan.device | smaller.plan.host
        assert smaller.plan.device_total < planned.plan.device_total
        assert (planned.plan.grad_buffers, smaller.plan.grad_buffers) == (2, 1)
        rooms.executor.close()
        build_executor(smaller, store=rooms.store, worker=rooms.worker).close()
        assert fewer_rows(smaller) is None
    finally:
        rooms.worker.close()
        rooms.store.close()
