"""A small model's anatomy and its gradients: what the tests of the optimizer room update."""

from __future__ import annotations

import torch

from megatrain.host.store import HostStore
from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.layout import FlatLayout, TensorSpec

PARAMETERS = {  # name in its unit -> shape; odd sizes leave padding behind them
    "attn.q.weight": (64, 32),
    "attn.q.bias": (64,),
    "mlp.up.weight": (129, 3),
    "mlp.experts_bias": (4, 32),
    "mixer.A_log": (16, 8),
    "norm.weight": (32,),
}


def small_unit(index: int, name: str, *, dtype: torch.dtype, unused: frozenset[str] = frozenset()) -> Unit:
    specs = [
        TensorSpec(entry, shape, torch.float32 if entry == "norm.weight" else dtype, True)
        for entry, shape in PARAMETERS.items()
    ]
    specs.append(TensorSpec("mixer.counter", (3,), torch.float32, False))
    layout = FlatLayout.of(specs)
    return Unit(index, name, layout, {e.name: (f"model.{name}.{e.name}",) for e in layout.entries}, unused)


def small_anatomy(dtype: torch.dtype, *, layers: int = 2, unused: frozenset[str] = frozenset()) -> Anatomy:
    return Anatomy(
        stem=small_unit(0, "stem", dtype=dtype, unused=unused),
        layers=tuple(small_unit(i + 1, f"layer {i}", dtype=dtype, unused=unused) for i in range(layers)),
        tail=small_unit(layers + 1, "tail", dtype=dtype, unused=unused),
        kinds=(0,) * layers,
        stem_in_tail=False,
        stem_in_layers=False,
    )


def fill_gradients(store: HostStore, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for host in store.units:
        for gradient in host.unit.layout.param_views(host.grad).values():
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
