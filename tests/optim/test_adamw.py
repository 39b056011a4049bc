"""AdamW over the store against torch.optim.AdamW(fused=True) with the same groups, gradients and clip factor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from optim_store import PARAMETERS, fill_gradients
from torch import Tensor

from megatrain.host.store import HostStore, HostUnit
from megatrain.optim import adamw as adamw_module
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import Kernel

LR, CLIP, DECAY = 1e-3, 0.37, 0.1
NEVER = frozenset(f"model.{unit}.mixer.A_log" for unit in ("stem", "layer 0", "layer 1", "tail"))
DECAYED = {"attn.q.weight", "mlp.up.weight"}  # matrices, but no biases and nothing that Hugging Face marks

StoreOf = Callable[..., HostStore]
FIELDS = ("hi", "lo", "exp_avg", "exp_avg_sq", "grad", "steps")


def optimizer_of(store: HostStore, *, kernel: Kernel | None = None, decay_all: bool = False) -> AdamW:
    return AdamW(
        store, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY, decay_all=decay_all, never_decay=NEVER, kernel=kernel
    )


class TorchTwin:
    """The same parameters in plain fp32 under torch's own optimizer."""

    def __init__(self, store: HostStore, *, decayed: set[str]) -> None:
        self.units = store.units
        self.params: dict[tuple[int, str], torch.nn.Parameter] = {}
        for host in store.units:
            for entry in host.unit.layout.params:
                self.params[host.unit.index, entry.name] = torch.nn.Parameter(host.master(entry))
        groups = [
            {"params": [p for (_, name), p in self.params.items() if name in decayed], "weight_decay": DECAY},
            {"params": [p for (_, name), p in self.params.items() if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)

    def step(self, *, without: frozenset[str] = frozenset()) -> None:
        for host in self.units:
            for name, grad in host.unit.layout.param_views(host.grad).items():
                self.params[host.unit.index, name].grad = None if name in without else grad.float() * CLIP
        self.optimizer.step()

    def check(self) -> None:
        for host in self.units:
            moments = host.unit.layout.elem_views(host.exp_avg), host.unit.layout.elem_views(host.exp_avg_sq)
            for entry in host.unit.layout.params:
                parameter = self.params[host.unit.index, entry.name]
                assert torch.equal(host.master(entry), parameter.detach()), entry.name
                state = self.optimizer.state.get(parameter, {})
                for moment, key in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
                    expected = state.get(key, torch.zeros(entry.shape))
                    assert torch.equal(moment[entry.name], expected), (entry.name, key)


@pytest.fixture(params=["kernel", "plain"])
def kernel(request: pytest.FixtureRequest, kernel_of: Callable[..., Kernel]) -> Kernel | None:
    return kernel_of(threads=2) if request.param == "kernel" else None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("decay_all", [False, True])
def test_equals_torch_for_every_parameter(
    store_of: StoreOf, kernel: Kernel | None, dtype: torch.dtype, *, decay_all: bool
) -> None:
    store = store_of(dtype)
    optimizer = optimizer_of(store, kernel=kernel, decay_all=decay_all)
    twin = TorchTwin(store, decayed=DECAYED | ({"norm.weight"} if decay_all else set()))
    for step in range(5):
        fill_gradients(store, seed=step)
        twin.step()
        for host in store.units:
            optimizer.update(host, lr=LR, clip=CLIP)
    twin.check()
    assert all(host.steps.tolist() == [5] * len(PARAMETERS) and host.version == 5 for host in store.units)


def test_parameters_without_a_gradient_are_skipped_as_in_torch(store_of: StoreOf, kernel: Kernel | None) -> None:
    """No decay, no step counted; afterwards their bias corrections lag behind the others'."""
    store = store_of(torch.bfloat16, unused=frozenset({"mixer.A_log"}))
    optimizer = optimizer_of(store, kernel=kernel)
    twin = TorchTwin(store, decayed=DECAYED)
    sometimes = frozenset({"attn.q.bias", "norm.weight"})  # the first between two that decay
    for step in range(4):
        fill_gradients(store, seed=step)
        absent = sometimes if step % 2 else frozenset()
        twin.step(without=absent | {"mixer.A_log"})
        for host in store.units:
            touched = tuple(entry.name not in absent for entry in host.unit.layout.params)
            optimizer.update(host, lr=LR, clip=CLIP, touched=touched)
    twin.check()
    names = [entry.name for entry in store.stem.unit.layout.params]
    expected = [0 if name == "mixer.A_log" else 2 if name in sometimes else 4 for name in names]
    assert store.stem.steps.tolist() == expected


def test_padding_and_buffers_stay_as_they_are(store_of: StoreOf, kernel: Kernel | None) -> None:
    """Even with eps 0, where an update of the padding would be 0/0."""
    store = store_of(torch.bfloat16)
    optimizer = AdamW(
        store, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0, decay_all=False, never_decay=frozenset(), kernel=kernel
    )
    host = store.stem
    (buffer,) = host.unit.layout.buffers
    host.streamed(buffer).copy_(torch.tensor([1.0, 2.0, 3.0]))
    fill_gradients(store, seed=0)
    grad = host.grad.clone()
    optimizer.update(host, lr=LR, clip=CLIP)
    assert torch.equal(host.grad, grad)
    assert host.streamed(buffer).tolist() == [1.0, 2.0, 3.0]
    for flat in (host.unit.layout.bf16_part(host.hi), host.lo, host.exp_avg, host.exp_avg_sq):
        assert not _outside_of_parameters(host, flat).any()


def _outside_of_parameters(host: HostUnit, flat: Tensor) -> Tensor:
    """Elements of a per-element tensor (or of its bf16 run) that belong to no parameter."""
    inside = torch.zeros(flat.numel(), dtype=torch.bool)
    for entry in host.unit.layout.params:
        inside[entry.elems] = True
    assert not inside.all()
    return flat[~inside]


def test_a_second_update_of_the_same_unit_touches_no_other(store_of: StoreOf, kernel: Kernel | None) -> None:
    store, untouched = store_of(torch.bfloat16), store_of(torch.bfloat16)
    optimizer = optimizer_of(store, kernel=kernel)
    for twice in (store, untouched):
        fill_gradients(twice, seed=1)
    optimizer.update(store.units[1], lr=LR, clip=1.0)
    optimizer.update(store.units[1], lr=LR, clip=1.0)
    assert [host.version for host in store.units] == [0, 2, 0, 0]
    for i in (0, 2, 3):
        for field in FIELDS:
            assert torch.equal(getattr(store.units[i], field), getattr(untouched.units[i], field))


def test_plain_torch_in_pieces_gives_the_same_bits(store_of: StoreOf, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = store_of(torch.bfloat16), store_of(torch.bfloat16)
    for store, chunk in ((whole, 1 << 22), (pieces, 128)):
        monkeypatch.setattr(adamw_module, "PLAIN_CHUNK", chunk)
        optimizer = optimizer_of(store)
        fill_gradients(store, seed=3)
        for host in store.units:
            optimizer.update(host, lr=LR, clip=CLIP)
    for left, right in zip(whole.units, pieces.units, strict=True):
        assert all(torch.equal(getattr(left, field), getattr(right, field)) for field in FIELDS)


def test_consecutive_parameters_are_one_run_where_nothing_differs(store_of: StoreOf) -> None:
    """What the kernel is handed for a large layer: few long runs, cut at padding, decay, dtype and step count."""
    store = store_of(torch.bfloat16)
    optimizer = optimizer_of(store)
    host = store.stem
    runs = optimizer._runs(host, touched=None)
    sizes = [run.stop - run.start for run in runs]
    # q.weight (decays) | q.bias, then padding | up.weight (decays) | experts_bias + A_log | norm.weight (fp32)
    assert sizes == [2048, 64, 387, 256, 32]
    assert [run.decays for run in runs] == [True, False, True, False, False]
    assert [run.halves for run in runs] == [True, True, True, True, False]


def test_at_a_tiny_rate_nearly_every_master_moves_though_bf16_stands_still(store_of: StoreOf) -> None:
    store = store_of(torch.bfloat16)
    optimizer = optimizer_of(store)
    host = store.stem
    entry = host.unit.layout.params[0]
    before, streamed = host.master(entry), host.streamed(entry).clone()
    fill_gradients(store, seed=0)
    optimizer.update(host, lr=1e-6, clip=1.0)
    assert (host.master(entry) != before).float().mean() > 0.95
    assert (host.streamed(entry) != streamed).float().mean() < 0.05
