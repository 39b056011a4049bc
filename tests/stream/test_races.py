"""The product's rings, stores, worker and executor on the timeline: no race, and every wait earns its place."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from timeline import Race, TimelineDevice, TimelineUpdates
from toy import B, D, S, ToyModel, V, toy_batches

from megatrain.host.arena import footprint
from megatrain.host.store import HostStore
from megatrain.optim.adamw import AdamW
from megatrain.optim.worker import OptimizerFailed, OptimizerWorker
from megatrain.stream.activations import PIECE_BYTES
from megatrain.stream.device import StreamName
from megatrain.stream.executor import StreamingExecutor
from megatrain.stream.step import Geometry

STEPS = 2
PARTS = 7  # of the longest test: each within the time that a test may take, and (being odd) with every kind of shape
INPUT_BYTES = B * S * D * 4
ATTENTION_BYTES = PIECE_BYTES + B * S * 4
assert INPUT_BYTES <= PIECE_BYTES


@dataclass(frozen=True)
class Case:
    layers: int
    micro_batches: int
    slots: int
    grad_buffers: int
    load_buffers: int
    tied: bool
    behind: bool  # the optimizer lags: every update is waited for instead of being seen done
    resident: int = 0
    kept: int = 0
    slices: int = 0
    skips: bool = False  # the first step's update is left out, as for a step that is not finite
    experts: int = 0  # of every layer but the first of several
    groups: int = 0  # in which they come; 0: with their layer
    attention: str = ""  # where it is kept; "": it is recomputed


def cases(*, layers: tuple[int, ...], micro_batches: tuple[int, ...], loads: tuple[int, ...]) -> list[Case]:
    every = itertools.product(layers, micro_batches, (2, 3), (1, 2), loads, (False, True), (False, True))
    return [Case(*values) for values in every]


SMALL = cases(layers=(1, 2, 4), micro_batches=(1, 2), loads=(0, 2))
STAYING = [
    Case(layers, micro_batches, 2, 1, 0, tied, behind, resident, kept)
    for layers, micro_batches, tied, behind in itertools.product((1, 3), (1, 2), (False, True), (False, True))
    for resident, kept in {(1, 0), (2, 1), (layers, 1), (layers + 1, layers), (layers + 2, 0), (layers + 2, layers)}
]
SLICED = [
    Case(2, micro_batches, 2, grad_buffers, loads, tied, behind, slices=slices, skips=skips)
    for micro_batches, grad_buffers, loads, tied, behind, slices, skips in itertools.product(
        (1, 2), (1, 2), (0, 2), (False, True), (False, True), (2, 4), (False, True)
    )
]
GROUPED = [
    Case(layers, micro_batches, slots, grad_buffers, loads, False, behind, 0, 0, slices, skips, 5, groups)
    for layers, micro_batches, slots, grad_buffers, loads, behind, slices, skips, groups in itertools.product(
        (1, 3), (1, 2), (2, 3), (1, 2), (0, 2), (False, True), (0, 3), (False, True), (1, 2, 5)
    )
]
ATTENTION = [
    Case(layers, micro_batches, slots, 1, loads, False, behind, resident, attention=attention)
    for layers, micro_batches, slots, loads, behind, resident, attention in itertools.product(
        (2, 3), (1, 2), (2, 3), (0, 2), (False, True), (0, 2), ("device", "host")
    )
]
ATTENTION += [
    Case(2, 2, 2, 1, loads, tied, True, slices=2, attention=attention)
    for loads, tied, attention in itertools.product((0, 2), (False, True), ("device", "host"))
]
ATTENTION += [Case(3, 2, 2, 1, 0, False, False, 5, kept, attention="device") for kept in (1, 2)]
ALL = cases(layers=(1, 2, 3, 5), micro_batches=(1, 2, 3), loads=(0, 1, 2))


def run(case: Case, *, skip: int | None = None) -> tuple[TimelineDevice, list[float], torch.Tensor]:
    """Two steps with optimizer, each evaluated; the device, the losses, and all weights at the end."""
    device = TimelineDevice(skip=skip)
    model = ToyModel(case.layers, tied=case.tied, experts=case.experts)
    waiting = (INPUT_BYTES, ATTENTION_BYTES)
    rows = case.layers * case.micro_batches * sum(footprint(size, pinned=True) for size in waiting)
    rows += footprint(V * D * 4, pinned=True)
    store = HostStore.allocate(model.anatomy, pin=False, threads=1, extra_pinned_bytes=rows)
    for host in store.units:
        for entry in host.unit.layout.params:
            seed = zlib.crc32(f"{host.unit.index} {entry.name}".encode())  # not hash(): it differs by process
            generator = torch.Generator().manual_seed(seed)
            host.set_master(entry, torch.rand(entry.shape, generator=generator) - 0.5)
    updates = TimelineUpdates(device, units=len(store.units), behind=lambda unit: case.behind)

    def before(unit: int) -> None:
        device.touch(f"update({unit})", on=StreamName.HOST, reads=(f"slab{unit}",), writes=(f"host{unit}",))

    optimizer = AdamW(
        store, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decay_all=False, never_decay=frozenset(), kernel=None
    )
    worker = OptimizerWorker(optimizer, store=store, synchronous=True, before_unit=before, after_unit=updates.finished)
    geometry = Geometry(
        case.micro_batches,
        case.slots,
        case.grad_buffers,
        case.load_buffers,
        head_chunk=64,
        input_bytes=INPUT_BYTES,
        resident=case.resident,
        kept=case.kept,
        head_slices=case.slices,
        embedding_rows=V if case.slices else 0,
        expert_groups=case.groups,
        attention_bytes=ATTENTION_BYTES if case.attention else 0,
        attention_buffers=2 if case.attention == "host" else 0,
    )
    executor = StreamingExecutor(model, store=store, device=device, geometry=geometry, updates=updates, poison=True)
    losses = []
    for step in range(STEPS):
        out = executor.train_step(toy_batches(case.micro_batches, seed=step), seed=step)
        numbers = out.result()
        losses.append(numbers.loss)
        if step or not case.skips:
            with device.thread("optimizer"):
                worker.submit(step + 1, out.gradients, lr=0.1, clip=1.0)
        total, _ = executor.evaluate(toy_batches(case.micro_batches, seed=STEPS))  # the updates may still be running
        losses.append(total)
    executor.bring_home()
    weights = torch.cat([host.hi.clone() for host in store.units])
    store.close()
    return device, losses, weights


@pytest.mark.parametrize(
    ("chosen", "count"), [(SMALL, 192), pytest.param(ALL, 576, marks=pytest.mark.slow)], ids=["small", "all"]
)
def test_no_race_and_no_number_moves(chosen: list[Case], count: int) -> None:
    assert len(chosen) == count
    results: dict[tuple[int, int, bool], tuple[list[float], torch.Tensor]] = {}
    checked = 0
    for case in chosen:
        device, losses, weights = run(case)
        checked += len(device.waits)
        first = results.setdefault((case.layers, case.micro_batches, case.tied), (losses, weights))
        assert losses == first[0], case
        assert torch.equal(weights, first[1]), case
    assert len(results) < count / 10
    assert checked > 40 * count


def test_no_race_where_units_stay_and_no_number_moves() -> None:
    for case in STAYING:
        device, losses, weights = run(case)
        _, expected, expected_weights = run(replace(case, resident=0, kept=0))
        assert losses == expected, case
        assert torch.equal(weights, expected_weights), case
        fetches = [wait for wait in device.waits if wait.keeps == "no read before load"]
        assert bool(fetches) == (case.resident < case.layers + 2), case


def test_no_race_where_attention_is_kept_and_no_number_moves() -> None:
    for case in ATTENTION:
        device, losses, weights = run(case)
        _, expected, expected_weights = run(replace(case, attention=""))
        assert losses == expected, case
        assert torch.equal(weights, expected_weights), case
        loads = sum(wait.keeps == "no load before it is sent" for wait in device.waits)
        inputs = case.layers * case.micro_batches if case.load_buffers else 0
        attention = (case.layers - 1) * case.micro_batches if case.attention == "host" else 0
        assert loads == STEPS * (inputs + attention), case


@pytest.mark.parametrize("chosen", [SLICED[::5], pytest.param(SLICED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_race_where_the_head_is_sliced(chosen: list[Case]) -> None:
    for case in chosen:
        device, losses, weights = run(case)
        _, expected, expected_weights = run(replace(case, slices=0))
        assert losses == pytest.approx(expected, rel=1e-5), case
        assert torch.allclose(
            weights.view(torch.float32), expected_weights.view(torch.float32), rtol=1e-4, atol=1e-5
        ), case
        assert [wait for wait in device.waits if wait.keeps.startswith("no gather")], case


@pytest.mark.parametrize("chosen", [GROUPED[::29], pytest.param(GROUPED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_race_where_experts_come_in_groups(chosen: list[Case]) -> None:
    for case in chosen:
        device, losses, weights = run(case)
        _, expected, expected_weights = run(replace(case, groups=0, slices=0))
        assert losses == pytest.approx(expected, rel=1e-5), case
        assert torch.allclose(
            weights.view(torch.float32), expected_weights.view(torch.float32), rtol=1e-4, atol=1e-5
        ), case
        fetched = [what for what in device.order if what.endswith(("-> group0", "-> group1"))]
        assert len(fetched) >= 2 * min(2, case.groups), case


def _races(case: Case, *, skip: int) -> bool:
    try:
        run(case, skip=skip)
    except Race:
        return True
    except OptimizerFailed as failure:
        return isinstance(failure.__cause__, Race)
    return False


def classify(case: Case) -> list[tuple[str, str]]:
    """(invariant, killed | vacuous | alive) of every wait of the case, each dropped in a run of its own."""
    verdicts = []
    for wait in run(case)[0].waits:
        if wait.vacuous:
            verdicts.append((wait.keeps, "vacuous"))
            continue
        verdicts.append((wait.keeps, "killed" if _races(case, skip=wait.number) else "alive"))
    return verdicts


def _mutate(chosen: list[Case], record: Callable[[str, object], None]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for case in chosen:
        verdicts = classify(case)
        assert not [v for v in verdicts if v[1] == "alive"], (case, [v for v in verdicts if v[1] == "alive"])
        counts.update(verdicts)
    for (keeps, verdict), count in sorted(counts.items()):
        record(f"{keeps}: {verdict}", count)
    return counts


INVARIANTS = {
    "no fetch before update",
    "no overwrite before release",
    "no read before load",
    "no refill before offload",
    "no offload before fill",
    "no send before it is computed",
    "no reuse before it is sent",
    "no load before it is sent",
    "no read before it is home",
    "no update before the gradient is home",
}
OF_ROWS = {"no gather before the rows are fetched", "no gather before the rows are home"}
"""Where the embedding comes as rows."""


def test_every_wait_matters(record_property: Callable[[str, object], None]) -> None:
    chosen = [
        Case(3, 2, 2, 1, 2, False, False),
        Case(2, 2, 3, 2, 1, True, True),
        Case(4, 2, 2, 1, 0, False, True, resident=2, kept=2),
        Case(2, 2, 2, 1, 0, False, False, slices=4),
        Case(2, 1, 2, 2, 0, True, True, slices=4, skips=True),
        Case(2, 2, 2, 1, 2, False, False, experts=5, groups=5),
        Case(2, 1, 2, 2, 0, False, True, slices=2, experts=4, groups=3),
        Case(3, 2, 2, 1, 2, False, False, attention="host"),
        Case(3, 1, 2, 1, 0, True, False, resident=2, attention="host"),
    ]
    counts = _mutate(chosen, record_property)
    assert {keeps for keeps, verdict in counts if verdict == "killed"} == INVARIANTS | OF_ROWS


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_wait_of_every_shape(record_property: Callable[[str, object], None], part: int) -> None:
    every = [c for c in ALL if c.layers < 5] + SLICED + GROUPED[::41] + ATTENTION
    counts = _mutate(every[part::PARTS], record_property)
    assert {keeps for keeps, verdict in counts if verdict == "killed"} == INVARIANTS | OF_ROWS
    assert sum(counts.values()) > 5_000
