"""A new model: the architecture's own initialisation, unit by unit, so that no second copy of the model exists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.host.store import HostStore, HostUnit
from megatrain.host.weights import place


def init_random(store: HostStore, *, meta_model: Any, seed: int) -> None:
    """Draw every weight from Hugging Face's ``_init_weights``, in fp32, from `seed`, in the order of the units.

    Only one unit's tensors are real at a time; all others are on the meta device and marked as initialised.
    Raises ModelError naming a tensor that the architecture leaves unset. The default generator is as before.
    """
    config = meta_model.config
    with torch.device("meta"):
        model = type(meta_model)(config)
    model.to(torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for unit in store.units:
            _init_unit(model, unit)


def _init_unit(model: Any, host: HostUnit) -> None:
    entries = host.unit.layout.entries
    real: dict[str, Tensor] = {}
    for entry in entries:
        names = host.unit.full_names[entry.name]
        real[entry.name] = _materialise(model, names)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()
    for entry in entries:
        value = real[entry.name].detach()
        if value.is_floating_point() and bool(value.isnan().any()):
            raise ModelError(
                f"the initialisation of {type(model).__name__} leaves {host.unit.full_names[entry.name][0]} unset",
                hint="start from pretrained weights (model.init: pretrained)",
            )
        has_low = entry.trainable and entry.dtype is torch.bfloat16
        place(value, hi=host.streamed(entry), lo=host.low(entry) if has_low else None)
        _set(model, host.unit.full_names[entry.name], _meta(real[entry.name]))


def _materialise(model: Any, names: tuple[str, ...]) -> Tensor:
    """Make one tensor real, full of NaN, under all of its names."""
    old = _get(model, names[0])
    value = torch.empty_like(old, device="cpu")
    value.fill_(float("nan") if value.is_floating_point() else 0)
    made = nn.Parameter(value) if isinstance(old, nn.Parameter) else value
    _set(model, names, made)
    return made


def _meta(tensor: Tensor) -> Tensor:
    value = torch.empty_like(tensor, device="meta")
    made = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


def _get(model: Any, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), attribute)
    return found


def _set(model: Any, names: tuple[str, ...], tensor: Tensor) -> None:
    for name in names:
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, tensor)
