"""AdamW over a store whose moments are bf16: the same bits by every way, near to what fp32 moments give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optim_store import fill_gradients

from megatrain.host.store import HostStore
from megatrain.optim import adamw as adamw_module
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import Kernel

LR, CLIP = 1e-3, 0.37
FIELDS = ("hi", "lo", "exp_avg", "exp_avg_sq", "steps")
ABSENT = frozenset({"attn.q.bias", "norm.weight"})

StoreOf = Callable[..., HostStore]


def trained(
    store: HostStore, *, kernel: Kernel | None = None, seed: int = 11, decay: float = 0.1, steps: range = range(5)
) -> HostStore:
    """After some steps, in one of which some parameters have no gradient."""
    optimizer = AdamW(
        store, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, decay_all=False, never_decay=frozenset(),
        kernel=kernel, seed=seed,
    )  # fmt: skip
    for step in steps:
        fill_gradients(store, seed=step)
        for host in store.units:
            touched = tuple(step != 2 or entry.name not in ABSENT for entry in host.unit.layout.params)
            optimizer.update(host, lr=LR, clip=CLIP, touched=touched)
    return store


def same(left: HostStore, right: HostStore, *, fields: tuple[str, ...] = FIELDS) -> bool:
    pairs = zip(left.units, right.units, strict=True)
    return all(torch.equal(getattr(a, field), getattr(b, field)) for a, b in pairs for field in fields)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_and_plain_torch_in_any_pieces_agree(
    store_of: StoreOf, kernel_of: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    moments = torch.bfloat16
    by_kernel = trained(store_of(dtype, moments=moments), kernel=kernel_of(threads=2))
    assert by_kernel.stem.exp_avg.dtype is moments
    assert same(by_kernel, trained(store_of(dtype, moments=moments)))
    monkeypatch.setattr(adamw_module, "PLAIN_CHUNK", 128)
    assert same(by_kernel, trained(store_of(dtype, moments=moments)))


def test_another_seed_rounds_otherwise(store_of: StoreOf) -> None:
    one, other = (trained(store_of(torch.bfloat16, moments=torch.bfloat16), seed=seed) for seed in (0, 1))
    assert not same(one, other, fields=("exp_avg",))
    assert same(one, trained(store_of(torch.bfloat16, moments=torch.bfloat16), seed=0))


def test_grouping_of_parameters_changes_no_bit_of_the_moments(store_of: StoreOf) -> None:
    """Without decay all of a layer is few runs, with it many; moments do not depend on decay."""
    together = trained(store_of(torch.bfloat16, moments=torch.bfloat16), decay=0.0)
    apart = trained(store_of(torch.bfloat16, moments=torch.bfloat16), decay=0.1)
    assert not same(together, apart, fields=("lo",))
    assert same(together, apart, fields=("exp_avg", "exp_avg_sq"))


def test_an_interruption_changes_no_bit(store_of: StoreOf) -> None:
    """Nothing of the random bits is carried along: a new optimizer over the same state goes on as the old one."""
    whole = trained(store_of(torch.bfloat16, moments=torch.bfloat16), steps=range(6))
    halved = trained(store_of(torch.bfloat16, moments=torch.bfloat16), steps=range(3))
    assert same(whole, trained(halved, steps=range(3, 6)))


def test_moments_stay_within_a_few_spacings_of_fp32_ones(store_of: StoreOf) -> None:
    """And the weights near: after five steps of 1e-3 they are within 4 % of one such step of each other."""
    narrow, wide = trained(store_of(torch.bfloat16, moments=torch.bfloat16)), trained(store_of(torch.bfloat16))
    for a, b in zip(narrow.units, wide.units, strict=True):
        assert torch.equal(a.steps, b.steps)
        assert float((a.exp_avg_sq.float() - b.exp_avg_sq).abs().max() / b.exp_avg_sq.max()) < 0.02
        for entry in a.unit.layout.params:
            moved = (a.master(entry) - b.master(entry)).abs()
            assert 0 < float(moved.mean()) < 0.04 * LR
