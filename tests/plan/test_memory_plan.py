"""The plan: which cut of the step is taken, that its sums are what the rooms hold, and how it says no."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain.errors import DoesNotFit
from megatrain.model.sizes_types import ModelSizes
from megatrain.plan.accounting import MemoryPlan, checkpoint_bytes, host_bytes
from megatrain.plan.hardware import DeviceMemory, HostMemory, Limit
from megatrain.plan.job import Job, Settings
from megatrain.plan.memory import HOST_RESERVE, Limits, decide
from plan.jobs import GIB, TINY, model, unit

SEVEN_B = model(hidden=3584, layer=233_057_792, layers=28, vocab=152_064, saved=270_000)


def limits(
    host: int = 128 * GIB, *, vram: int | None = 140 * GIB, free: int | None = None, available: int | None = None
) -> Limits:
    return Limits(
        host=HostMemory(
            limit=Limit(host, "MemTotal"),
            available=Limit(host if available is None else available, "MemAvailable"),
            process_bytes=GIB // 2,
            may_grow=False,
        ),
        device=None if vram is None else DeviceMemory(vram, vram if free is None else free, "cuda:0"),
        threads=14,
    )


def make(
    sizes: ModelSizes = SEVEN_B,
    *,
    machine: Limits | None = None,
    batch: int = 32,
    seq: int = 2048,
    **settings: int | str,
) -> MemoryPlan:
    chosen = Settings(**settings)  # type: ignore[arg-type]
    return decide(
        Job(
            sizes,
            memory=chosen,
            batch_size=batch,
            seq_len=seq,
            packed=False,
            limits=machine or limits(),
            dense_masks=False,
        )
    )


def test_a_large_card_keeps_activations_and_stops_at_the_useful_size() -> None:
    chosen = make()
    assert (chosen.micro_batch, chosen.micro_batches, chosen.activations) == (8, 4, "device")
    assert (chosen.slots, chosen.grad_buffers, chosen.threads) == (2, 2, 14)
    assert chosen.fits
    assert chosen.device_limit == Limit(int(140 * GIB * 0.9), "90 % of cuda:0")


def test_the_store_takes_fourteen_bytes_a_parameter() -> None:
    table = host_bytes(SEVEN_B)
    steps = table.pop("step counts")
    pages = 4096 * (2 * 30 + 1)  # page-locked blocks own whole pages
    assert 14 * SEVEN_B.params_total <= sum(table.values()) < 14 * SEVEN_B.params_total + pages
    assert steps == 8 * 9 * 30
    fp32 = host_bytes(TINY)
    assert 0 <= fp32.pop("step counts") + sum(fp32.values()) - 16 * TINY.params_total - 8 * 9 * 6 < 4096 * 14
    assert fp32["low halves of the masters"] == 0


def test_bf16_moments_take_ten_bytes_a_parameter() -> None:
    table = host_bytes(SEVEN_B, moment_bytes=2)
    assert 0 <= sum(table.values()) - table["step counts"] - 10 * SEVEN_B.params_total < 4096 * 61
    wide = make()
    slim = decide(Job(
        SEVEN_B, memory=Settings(), batch_size=32, seq_len=2048, packed=False, limits=limits(), dense_masks=False,
        moment_bytes=2,
    ))  # fmt: skip
    assert slim.host == wide.host | {"optimizer moments": wide.host["optimizer moments"] // 2}
    assert checkpoint_bytes(SEVEN_B) - checkpoint_bytes(SEVEN_B, moment_bytes=2) == slim.host["optimizer moments"]


def test_persistent_buffers_travel_with_the_weights_but_have_no_gradient() -> None:
    layers = tuple(replace(u, streamed_bytes=u.streamed_bytes + 4096) for u in TINY.layers)
    with_buffers = host_bytes(replace(TINY, layers=layers))
    assert with_buffers["weights as streamed"] - host_bytes(TINY)["weights as streamed"] == 4 * 4096
    assert with_buffers["gradients"] == host_bytes(TINY)["gradients"]


def test_less_vram_first_moves_activations_then_cuts_the_micro_batch() -> None:
    ceilings = [60, 32, 24, 20, 17]
    plans = [make(vram=gib * GIB) for gib in ceilings]
    assert all(p.device_total <= gib * GIB for p, gib in zip(plans, ceilings, strict=True))
    assert all(a.micro_batch >= b.micro_batch for a, b in pairwise(plans))
    assert plans[0].activations == "device"
    assert plans[-1].activations == "host"
    assert plans[-1].micro_batch < plans[0].micro_batch
    last = plans[-1]
    assert last.host["activations"] == 28 * last.micro_batch * last.micro_batches * 2048 * 7168


def test_seven_b_trains_within_24_gib_on_128_gib_of_host() -> None:
    chosen = make(vram=24 * GIB)
    assert chosen.device_limit == Limit(24 * GIB, "memory.vram")
    assert chosen.fits


@pytest.mark.parametrize("batch", [1, 3, 7, 32, 100])
@pytest.mark.parametrize("seq", [16, 2048, 40_000])
def test_micro_batches_cover_the_batch_evenly(batch: int, seq: int) -> None:
    chosen = make(TINY, batch=batch, seq=seq)
    assert chosen.micro_batch * chosen.micro_batches >= batch
    assert chosen.micro_batch * (chosen.micro_batches - 1) < batch
    assert chosen.micro_batch == 1 or chosen.micro_batch * seq <= 16_384


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"micro_batch": 2}, {"micro_batch": 2, "micro_batches": 16}),
        ({"micro_batch": 500}, {"micro_batch": 32, "micro_batches": 1}),
        ({"slots": 4}, {"slots": 4}),
        ({"activations": "host"}, {"activations": "host"}),
        ({"activations": "device"}, {"activations": "device"}),
        ({"threads": 3}, {"threads": 3}),
    ],
)
def test_what_the_recipe_states_is_taken(settings: dict[str, int | str], expected: dict[str, int | str]) -> None:
    chosen = make(**settings)  # type: ignore[arg-type]
    assert {name: getattr(chosen, name) for name in expected} == expected


def test_every_stated_number_shows_in_the_sums() -> None:
    base = make(micro_batch=4, activations="device")
    layer = SEVEN_B.layers[0]
    assert (
        make(micro_batch=4, activations="device", slots=5).device_total == base.device_total + 3 * layer.streamed_bytes
    )
    moved = make(micro_batch=4, activations="host")
    assert moved.host_total - base.host_total == base.device["activations"]
    assert moved.device["activations"] == 4 * 4 * 2048 * 7168


def test_slots_hold_the_largest_layer_of_mixed_kinds() -> None:
    mixed = replace(TINY, layers=(*TINY.layers, unit("layer 4", 900_000, fp32=True, buffers=512)))
    chosen = make(mixed)
    assert chosen.device["weight slots"] == 2 * (3_600_000 + 512)
    assert chosen.device["gradient buffers"] == 2 * 3_600_000


def test_a_large_vocabulary_gets_a_smaller_head_chunk() -> None:
    wide = replace(SEVEN_B, vocab_size=1_000_000, saved_bytes_per_token=100)
    assert make(TINY).head_chunk == 4096
    chunks = [make(wide, vram=gib * GIB, batch=8, seq=1024).head_chunk for gib in (120, 64, 32, 24)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[-1] < chunks[0]
    assert chunks[-1] * wide.vocab_size * 8 + wide.tail.param_bytes <= 24 * GIB * 0.1


def test_logits_may_take_what_a_layer_takes_anyway() -> None:
    narrow = make(replace(SEVEN_B, saved_bytes_per_token=10_000), vram=24 * GIB, micro_batch=4)
    hungry = make(SEVEN_B, vram=24 * GIB, micro_batch=4)
    assert hungry.head_chunk > narrow.head_chunk


def test_the_executor_gets_what_it_allocates_for() -> None:
    on_host = make(activations="host", micro_batch=4)
    assert on_host.load_buffers == 2
    assert on_host.input_bytes == 4 * 2048 * 7168
    assert on_host.host["activations"] == 28 * 8 * on_host.input_bytes
    assert make(activations="device").load_buffers == 0


@pytest.mark.parametrize("machine", [limits(), limits(64 * GIB, vram=None)], ids=["gpu", "cpu"])
def test_a_plan_survives_the_manifest(machine: Limits) -> None:
    chosen = make(TINY, machine=machine)
    assert MemoryPlan.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen


def test_a_run_that_goes_on_keeps_what_decides_rounding() -> None:
    def resume(kept: MemoryPlan, settings: Settings) -> MemoryPlan:
        return decide(
            Job(
                SEVEN_B,
                memory=settings,
                batch_size=32,
                seq_len=2048,
                packed=False,
                limits=limits(),
                dense_masks=False,
                resumed=kept,
            )
        )

    tight = make(vram=14 * GIB)
    roomy = resume(tight, Settings())
    assert (roomy.micro_batch, roomy.head_chunk) == (tight.micro_batch, tight.head_chunk)
    assert (make().micro_batch, make().head_chunk) != (tight.micro_batch, tight.head_chunk)
    assert (tight.activations, roomy.activations) == ("host", "device")
    assert resume(tight, Settings(micro_batch=1)).micro_batch == 1  # what is stated wins
    with pytest.raises(DoesNotFit, match=r"memory\.vram"):
        resume(make(), Settings(vram=12 * GIB))


def test_a_head_of_its_own_lets_stem_and_tail_share_one_gradient_sum() -> None:
    def sums(*, shared: bool) -> int:
        chosen = decide(
            Job(
                SEVEN_B,
                memory=Settings(),
                batch_size=8,
                seq_len=512,
                packed=False,
                limits=limits(),
                stem_shared=shared,
            )
        )
        return chosen.device["fp32 gradient sums"]

    assert sums(shared=True) - sums(shared=False) == 4 * SEVEN_B.stem.elems
    assert sums(shared=False) == 4 * (SEVEN_B.layers[0].elems + SEVEN_B.tail.elems)


@pytest.mark.parametrize(("fp32", "chunk_bytes"), [(True, 16), (False, 8)])
def test_only_chunks_of_bf16_logits_do_without_the_whole_softmax(fp32: bool, chunk_bytes: int) -> None:
    wide = model(hidden=64, layer=10_000, layers=2, vocab=100_000, saved=100, fp32=fp32)
    whole = make(wide, batch=1, seq=1024)
    assert whole.head_chunk == 4096
    assert whole.device["one layer's backward or the head"] == 1024 * 100_000 * 16 + wide.tail.param_bytes
    chunked = make(wide, batch=1, seq=8192)
    head = 4096 * 100_000 * chunk_bytes + wide.tail.param_bytes
    assert chunked.device["one layer's backward or the head"] == head


def test_dense_masks_are_counted_where_rows_are_packed_or_padded() -> None:
    def masks(*, packed: bool, dense: bool, micro: int) -> int:
        chosen = decide(
            Job(
                TINY,
                memory=Settings(micro_batch=micro),
                batch_size=8,
                seq_len=512,
                packed=packed,
                limits=limits(),
                dense_masks=dense,
            )
        )
        return chosen.device.get("attention masks", 0)

    assert masks(packed=True, dense=True, micro=1) == 8 * 512 * 512
    assert masks(packed=False, dense=True, micro=2) == 8 * 512 * 512
    assert masks(packed=False, dense=True, micro=1) == 0
    assert masks(packed=True, dense=False, micro=2) == 0


def test_on_the_cpu_compute_buffers_are_host_memory() -> None:
    chosen = make(TINY, machine=limits(8 * GIB, vram=None))
    assert chosen.device_limit is None
    assert "context and workspaces" not in chosen.device
    assert chosen.host_total == sum(chosen.host.values()) + chosen.device_total
    on_gpu = make(TINY)
    assert on_gpu.host_total == sum(on_gpu.host.values())


def test_a_vram_ceiling_holds_on_the_cpu_too() -> None:
    machine = limits(8 * GIB, vram=None)
    free = make(TINY, machine=machine, batch=64, seq=256)
    tight = make(TINY, machine=machine, batch=64, seq=256, vram=free.device_total // 2)
    assert tight.device_total <= free.device_total // 2
    assert tight.micro_batch < free.micro_batch


def test_an_automatic_host_limit_leaves_room_for_the_system() -> None:
    assert make().host["left to the system"] == HOST_RESERVE
    assert make(TINY, machine=limits(8 * GIB)).host["left to the system"] == 8 * GIB // 20
    assert "left to the system" not in make(host=120 * GIB).host


def test_a_stated_host_ceiling_cannot_exceed_the_machine_unless_it_grows() -> None:
    assert make(host=500 * GIB).host_limit == Limit(128 * GIB, "MemTotal")
    growing = limits(32 * GIB, available=30 * GIB)
    growing = replace(growing, host=replace(growing.host, may_grow=True))
    assert make(machine=growing, host=120 * GIB).host_limit == Limit(120 * GIB, "memory.host")
    with pytest.raises(DoesNotFit, match="MemTotal"):
        make(machine=growing)


def test_vram_held_by_other_programs_lowers_the_limit() -> None:
    assert make(machine=limits(free=50 * GIB)).device_limit == Limit(50 * GIB, "free on cuda:0")
    assert make(machine=limits(free=50 * GIB), vram=60 * GIB).device_limit == Limit(50 * GIB, "free on cuda:0")


def test_too_little_host_memory_names_numbers_purposes_and_what_to_do() -> None:
    with pytest.raises(DoesNotFit) as caught:
        make(host=64 * GIB)
    assert caught.value.exit_code == 3
    text = str(caught.value)
    assert "64.00 GiB may be used (memory.host)" in text
    assert "optimizer moments 56.7" in text
    assert "hint: this is enough: raise memory.host to 100GiB" in text
    assert make(host=100 * GIB).fits
    assert "optimizer.state: bf16 (saves 28.37 GiB)" in text


def test_too_little_vram_names_the_smallest_cut_that_was_tried() -> None:
    with pytest.raises(DoesNotFit) as caught:
        make(vram=6 * GIB)
    text = str(caught.value)
    assert "may use 6.00 GiB (memory.vram), with 1 row of 2048 tokens at once and activations on the host" in text
    assert "fp32 gradient sums" in text
    assert "raise memory.vram" in text


def test_a_stated_micro_batch_that_does_not_fit_is_refused_not_changed() -> None:
    with pytest.raises(DoesNotFit, match="32 rows of 2048") as caught:
        make(vram=24 * GIB, micro_batch=32)
    assert caught.value.hint is not None
    assert "leave memory.micro_batch at auto" in caught.value.hint


def test_a_container_limit_is_named_in_the_hint() -> None:
    machine = limits(16 * GIB)
    machine = replace(machine, host=replace(machine.host, limit=Limit(16 * GIB, "cgroup v2 memory.max of /job")))
    with pytest.raises(DoesNotFit, match=r"memory\.max of /job") as caught:
        make(machine=machine)
    assert caught.value.hint is not None
    assert "give the container more memory" in caught.value.hint


def test_memory_held_by_others_refuses_but_does_not_alter_the_plan() -> None:
    roomy = make(TINY, machine=limits(8 * GIB, vram=None))
    busy = make(TINY, machine=limits(8 * GIB, vram=None, available=4 * GIB))
    assert replace(busy) == replace(roomy)
    with pytest.raises(DoesNotFit, match="is free now") as caught:
        make(TINY, machine=limits(8 * GIB, vram=None, available=GIB // 2))
    assert caught.value.hint is not None


def test_planning_needs_no_torch() -> None:
    code = "import sys, megatrain.plan.memory; print([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "[]"
