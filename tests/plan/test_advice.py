"""What to change when it does not fit: every change is planned again, so the numbers are those of a real plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatrain.errors import DoesNotFit
from megatrain.plan.advice import Advice, advise
from megatrain.plan.cutting import attempt, nearest
from megatrain.plan.disk import MANY, SPARE_BYTES, DiskNeeds
from megatrain.plan.explain import explain
from megatrain.plan.hardware import DeviceMemory, HostMemory, Limit
from megatrain.plan.job import Job, Limits
from megatrain.plan.largest import find_largest, scaled
from megatrain.plan.memory import decide
from megatrain.plan.preflight import disk_shortage, page_lock_warning
from megatrain.units import parse_size
from plan.jobs import GIB, SEVEN_B, TINY, job, limits


def advice_for(unfit: Job) -> dict[str, Advice]:
    short = attempt(unfit)
    assert not short.fits
    return {a.change: a for a in advise(unfit, short=short)}


def at_host(machine: Limits, size: int) -> Limits:
    return replace(machine, host=replace(machine.host, limit=Limit(size, "MemTotal")))


def advised_host(hint: str) -> int:
    (size,) = re.findall(r"a machine with (\S+) of host memory", hint)
    return parse_size(size)


def test_bf16_moments_save_four_bytes_a_parameter() -> None:
    found = advice_for(job(limits=limits(96 * GIB)))["optimizer.state: bf16"]
    assert found.enough
    assert 0 <= 4 * SEVEN_B.params_total - found.saves < 4096 * 30
    assert str(found) == "optimizer.state: bf16 (saves 28.37 GiB)"


def test_every_change_that_is_called_enough_makes_it_fit_and_no_other_does() -> None:
    unfit = job(limits=limits(104 * GIB, vram=24 * GIB), batch=64)
    found = advice_for(unfit)
    fewer = next(a for name, a in found.items() if name.startswith("train.batch_size 64 -> "))
    rows = int(fewer.change.rpartition(" ")[2])
    assert fewer.enough
    assert attempt(replace(unfit, batch_size=rows)).fits
    assert not attempt(replace(unfit, batch_size=2 * rows)).fits
    shorter = next(a for name, a in found.items() if name.startswith("data.max_seq_len 2048 -> "))
    length = int(shorter.change.rpartition(" ")[2])
    assert attempt(replace(unfit, seq_len=length)).fits == shorter.enough


def test_savings_are_those_of_the_nearest_plans() -> None:
    unfit = job(limits=limits(104 * GIB, vram=24 * GIB), batch=64)
    halves = next(a for name, a in advice_for(unfit).items() if name.startswith("train.batch_size 64 -> "))
    rows = int(halves.change.rpartition(" ")[2])
    assert halves.enough
    assert halves.saves > 0
    assert halves.saves == nearest(unfit).host_total - nearest(replace(unfit, batch_size=rows)).host_total


def test_changes_that_are_enough_come_first_and_then_by_what_they_save() -> None:
    unfit = job(limits=limits(104 * GIB, vram=24 * GIB), batch=64)
    ranked = advise(unfit, short=attempt(unfit))
    flags = [a.enough for a in ranked]
    assert flags == sorted(flags, reverse=True)
    assert ranked[0].saves == max(a.saves for a in ranked if a.enough)


def test_a_device_that_is_too_small_is_told_what_would_do() -> None:
    unfit = job(vram=6 * GIB)
    found = advice_for(unfit)
    larger = next(a for name, a in found.items() if name.startswith("raise memory.vram to "))
    assert larger.enough
    stated = float(larger.change.removeprefix("raise memory.vram to ").removesuffix("GiB"))
    assert attempt(job(vram=int(stated * GIB))).fits
    assert not attempt(job(vram=int((stated - 1) * GIB))).fits


def test_stated_settings_are_freed_first() -> None:
    found = advice_for(job(vram=24 * GIB, micro_batch=32, activations="device", slots=6))
    assert {"leave memory.micro_batch at auto", "leave memory.slots at auto"} <= set(found)
    assert "leave memory.activations at auto" in found


def test_when_no_single_change_is_enough_the_message_says_so() -> None:
    machine = limits(40 * GIB)
    with pytest.raises(DoesNotFit, match="host memory of") as caught:
        decide(job(limits=machine))
    assert caught.value.exit_code == 3
    assert caught.value.hint is not None
    assert "a machine with" in caught.value.hint
    both = job(limits=machine, vram=2 * GIB)
    with pytest.raises(DoesNotFit) as caught:
        decide(both)
    assert caught.value.hint is not None
    assert "the device needs" in str(caught.value)
    assert "; and host memory of" in str(caught.value)
    assert "no single change is enough" in caught.value.hint
    (device,) = re.findall(r"raise memory.vram to (\S+) together with a machine with", caught.value.hint)
    assert attempt(job(limits=at_host(machine, advised_host(caught.value.hint)), vram=parse_size(device))).fits


@pytest.mark.parametrize("vram", [16, 24, 100])
def test_a_refusal_quotes_the_nearest_plan_and_the_least_machine_that_is_enough(vram: int) -> None:
    """Also where activations fit on the device, so that the least of the device is not what misses by least."""
    enough = next(n for n in range(90, 130) if attempt(job(limits=limits(n * GIB, vram=vram * GIB))).fits)
    tight = limits((enough - 1) * GIB, vram=vram * GIB)
    with pytest.raises(DoesNotFit) as caught:
        decide(job(limits=tight))
    (quoted,) = re.findall(r"host memory of (\S+) GiB is needed", str(caught.value))
    assert enough - 1 < float(quoted) <= enough
    assert caught.value.hint is not None
    advised = advised_host(caught.value.hint)
    assert advised <= enough * GIB
    assert attempt(job(limits=at_host(tight, advised))).fits
    assert not attempt(job(limits=at_host(tight, int(0.98 * advised)))).fits


@pytest.mark.parametrize(
    ("host", "vram", "batch"), [(100, 24, 64), (99, 24, 32), (113, 24, 64), (104, 8, 32), (128, 6, 32)]
)
def test_a_change_is_enough_when_it_saves_all_that_is_missing_and_only_then(host: int, vram: int, batch: int) -> None:
    unfit = job(limits=limits(host * GIB), vram=vram * GIB, batch=batch)
    short = attempt(unfit)
    assert short.device_limit is not None
    missing = max(0, short.host_total - short.host_limit.bytes) + max(0, short.device_total - vram * GIB)
    changes = [a for a in advise(unfit, short=short) if a.saves]
    assert changes
    assert all(a.enough == (a.saves >= missing) for a in changes)


def test_where_both_are_short_a_machine_with_both_is_advised() -> None:
    unfit = job(limits=limits(99 * GIB, vram=24 * GIB), vram=24 * GIB)
    (joint,) = (a for a in advise(unfit, short=attempt(unfit)) if a.joint)
    device, host = (parse_size(size) for size in re.findall(r"[0-9.]+GiB", joint.change))
    assert device < 25 * GIB
    assert host < 103 * GIB
    for of_device, of_host, fits in ((1, 1, True), (0.98, 1, False), (1, 0.98, False)):
        machine = limits(int(of_host * host), vram=int(of_device * device))
        assert attempt(job(limits=machine, vram=int(of_device * device))).fits == fits


def test_a_larger_device_is_advised_where_it_takes_the_activations() -> None:
    unfit = job(limits=limits(104 * GIB, vram=8 * GIB))
    (change,) = (name for name, a in advice_for(unfit).items() if name.startswith("a device with ") and not a.joint)
    size = parse_size(change.split()[3])
    for share, fits in ((1.0, True), (0.98, False)):
        card = DeviceMemory(int(share * size), int(share * size), "cuda:0")
        assert attempt(job(limits=replace(unfit.limits, device=card), vram=int(share * size))).fits == fits


def test_a_container_is_named_in_the_hint() -> None:
    limit = Limit(64 * GIB, "cgroup v2 memory.max of /job")
    machine = replace(limits(), host=HostMemory(limit, limit, 0, False))
    with pytest.raises(DoesNotFit) as caught:
        decide(job(limits=machine))
    assert caught.value.hint is not None
    assert "give the container more memory: " in caught.value.hint


# --- words -------------------------------------------------------------------------------------------------


def test_a_plan_explains_itself() -> None:
    def text(**changes: object) -> str:
        asked = job(**changes)  # type: ignore[arg-type]
        return "\n".join(explain(attempt(asked), job=asked))

    roomy = text(vram=40 * GIB)
    assert "8 rows (16,384 tokens) go through a layer together, 4 times a step: beyond 16,384 tokens" in roomy
    assert "wait on the device" in roomy
    assert "the embedding and the first" in roomy
    assert "40.00 GiB (memory.vram)" in roomy
    tight = text(vram=14 * GIB)
    assert "the largest that fits" in tight
    assert "the device has no room for them" in tight
    assert "all 28 layers stream through 2 slots" in tight
    assert "as memory.micro_batch says" in text(micro_batch=2)
    everything = text(limits=limits(256 * GIB, vram=200 * GIB), batch=4)
    assert "every layer, the embedding and the head stay on the device" in everything
    assert "recompute nothing" in everything


def test_on_a_cpu_there_is_no_device_to_speak_of() -> None:
    asked = job(TINY, limits=limits(16 * GIB, vram=None), batch=4, seq=64, can_reside=False)
    said = "\n".join(explain(attempt(asked), job=asked))
    assert "the inputs of the 4 layers wait in memory: " in said
    assert "the device" not in said
    with pytest.raises(DoesNotFit) as caught:
        decide(replace(asked, limits=limits(256 << 20, vram=None)))
    assert "activations in memory: " in str(caught.value)
    assert "the device" not in str(caught.value)


# --- page-locking and disk -----------------------------------------------------------------------------------


def test_less_page_locking_than_wanted_is_said_and_refuses_nothing() -> None:
    limited = job(limits=limits(page_lock=Limit(16 * GIB, "RLIMIT_MEMLOCK under WSL2")))
    chosen = decide(limited)
    warning = page_lock_warning(chosen, job=limited)
    assert warning is not None
    assert "16.00 GiB can be (RLIMIT_MEMLOCK under WSL2)" in warning
    assert "pageable" in warning
    roomy = job(limits=limits(page_lock=Limit(120 * GIB, "WSL2")))
    assert page_lock_warning(decide(roomy), job=roomy) is None
    assert page_lock_warning(chosen, job=job()) is None


def needs(*, saves: int, most: int | None = None, keep: int = 2, export: int = 15, resumed: bool = False) -> DiskNeeds:
    """Checkpoints of 85 GiB."""
    return DiskNeeds(85 * GIB, export * GIB, keep, saves, saves if most is None else most, resumed)


def test_disk_by_purpose_holds_every_kept_checkpoint_the_one_being_written_and_the_export() -> None:
    one = 85 * GIB
    table = {"checkpoint being written": one, "checkpoints kept": 2 * one, "exported model": 15 * GIB}
    assert needs(saves=2, most=MANY).table == table
    assert needs(saves=1, export=0).table == {"checkpoint being written": one}
    assert needs(saves=2).table["checkpoints kept"] == one
    assert "checkpoints kept" not in needs(saves=0).table


@pytest.mark.parametrize(
    ("known", "least", "all_kept"),
    [
        (needs(saves=1), 100, 100),  # the last checkpoint, and the export beside it
        (needs(saves=2), 170, 185),  # two at once, or the export beside two
        (needs(saves=9), 170, 255),
        (needs(saves=9, keep=1), 170, 170),
        (needs(saves=9, export=100), 185, 270),  # the older one makes room for the export
        (needs(saves=1, most=MANY), 100, 255),  # by the clock: one is certain
        (needs(saves=0), 15, 15),  # nothing is left to do but the export
        (needs(saves=1, resumed=True), 85, 100),  # what it goes on from is there and stays; later it goes
        (needs(saves=9, resumed=True), 85, 170),
        (needs(saves=0, resumed=True), 15, 15),
        (needs(saves=9, keep=1, export=0, resumed=True), 85, 85),
    ],
)
def test_what_of_the_disk_a_run_must_have_and_what_it_takes_to_keep_all(
    known: DiskNeeds, least: int, all_kept: int
) -> None:
    assert (known.least, known.all_kept) == (least * GIB + SPARE_BYTES, all_kept * GIB + SPARE_BYTES)


def test_who_writes_nothing_needs_nothing() -> None:
    assert needs(saves=0, export=0).least == 0


def test_a_disk_is_short_of_what_must_be_or_of_what_is_kept() -> None:
    known = needs(saves=9)
    assert disk_shortage(known, free=255 * GIB + SPARE_BYTES) is None
    tight = disk_shortage(known, free=200 * GIB)
    assert tight is not None
    assert "200.00 GiB are free" in tight
    assert "checkpoints kept 170.00 GiB" in tight
    assert "the oldest goes" in tight
    short = disk_shortage(known, free=169 * GIB)
    assert short == (
        "at least 170.00 GiB of disk are needed and 169.00 GiB are free: a checkpoint takes 85.00 GiB, and the one "
        "before stays until it is whole; the exported model 15.00 GiB beside the last"
    )


# --- the largest -----------------------------------------------------------------------------------------------


def test_the_largest_that_fits_fits_and_one_more_does_not() -> None:
    base = job(limits=limits(128 * GIB, vram=24 * GIB))
    found = find_largest(base)

    def fits(**changes: object) -> bool:
        return attempt(replace(base, can_reside=False, **changes)).fits  # type: ignore[arg-type]

    one_row = replace(base.memory, micro_batch=1)
    assert fits(batch_size=found.batch_size, memory=one_row)
    assert not fits(batch_size=found.batch_size + 1, memory=one_row)
    assert fits(batch_size=1, seq_len=found.max_seq_len)
    assert not fits(batch_size=1, seq_len=found.max_seq_len + 256)
    assert fits(batch_size=found.micro_batch, memory=replace(base.memory, micro_batch=found.micro_batch))
    rows = found.micro_batch + 1
    assert not fits(batch_size=rows, memory=replace(base.memory, micro_batch=rows))
    assert found.model_params > 7e9
    assert set(found.how) == {"micro_batch", "batch_size", "max_seq_len", "model"}


def test_where_nothing_fits_the_largest_is_nothing() -> None:
    found = find_largest(job(limits=limits(4 * GIB, vram=1 * GIB)))
    assert (found.batch_size, found.micro_batch, found.max_seq_len) == (0, 0, 0)


def test_a_scaled_model_grows_with_the_cube_of_its_scale() -> None:
    assert scaled(SEVEN_B, 1.0).params_total == pytest.approx(SEVEN_B.params_total, rel=1e-6)
    double = scaled(SEVEN_B, 2.0)
    assert len(double.layers) == 56
    assert sum(u.elems for u in double.layers) == pytest.approx(8 * sum(u.elems for u in SEVEN_B.layers), rel=1e-3)
    assert double.stem.elems == pytest.approx(2 * SEVEN_B.stem.elems, rel=1e-3)
    assert scaled(TINY, 0.01).layers


def test_a_device_that_others_hold_whole_is_an_answer_too() -> None:
    card = DeviceMemory(24 * GIB, 0, "cuda:0")
    found = advice_for(job(limits=replace(limits(), device=card)))
    assert any(name.startswith("free the device of other programs") for name in found)
