"""A new model: the architecture's own initialisation, unit by unit, so that no second copy of the model exists."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.host import halves
from megatrain.host.draws import ParallelDraws
from megatrain.host.store import HostStore, HostUnit
from megatrain.model.layout import Entry

PIECE_ELEMS = 1 << 20
"""Elements that one thread splits into halves at a time."""


def init_random(store: HostStore, *, meta_model: Any, seed: int, threads: int | None = None) -> None:
    """Draw every weight from Hugging Face's ``_init_weights``, in fp32, from `seed`, in the order of the units.

    Only one unit's tensors are real at a time, in the room of its moments (zero again afterwards); all
    others are on the meta device and marked as initialised. The default generator is left as it was.
    Raises ModelError naming a tensor that the architecture leaves unset.
    """
    with torch.device("meta"):
        model = type(meta_model)(meta_model.config)
    model.to(torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    workers = threads or min(16, len(os.sched_getaffinity(0)))
    with torch.random.fork_rng(devices=[]), ThreadPoolExecutor(workers, thread_name_prefix="init") as pool:
        torch.manual_seed(seed)
        draws = ParallelDraws(pool)
        for unit in store.units:
            _init_unit(model, unit, draws=draws, pool=pool)


def _init_unit(model: Any, host: HostUnit, *, draws: ParallelDraws, pool: ThreadPoolExecutor) -> None:
    entries = host.unit.layout.entries
    real: dict[str, Tensor] = {}
    for entry in entries:
        names = host.unit.full_names[entry.name]
        real[entry.name] = _materialise(model, names, room=_room(host, entry))
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    with draws:
        model.initialize_weights()
    for entry in entries:
        names, value = host.unit.full_names[entry.name], real[entry.name].detach()
        if value.is_floating_point() and bool(value.isnan().any()):
            raise ModelError(
                f"the initialisation of {type(model).__name__} leaves {names[0]} unset",
                hint="start from pretrained weights (model.init: pretrained)",
            )
        _keep(host, entry, value, pool=pool)
        _set(model, names, _meta(real[entry.name]))
    host.moments.zero_()


def _room(host: HostUnit, entry: Entry) -> Tensor | None:
    """Memory of the store where a parameter can be drawn in fp32, if there is some: fp32, entry.shape."""
    if entry.trainable and entry.dtype is torch.float32:
        return host.streamed(entry)
    if entry.trainable and host.moments.numel():
        return host.moments.view(torch.float32)[entry.elems].view(entry.shape)  # two of bf16 are as wide as one of fp32
    return None


def _keep(host: HostUnit, entry: Entry, value: Tensor, *, pool: ThreadPoolExecutor) -> None:
    streamed = host.streamed(entry)
    if not entry.trainable or entry.dtype is torch.float32:
        if value.data_ptr() != streamed.data_ptr():
            streamed.copy_(value)
        return
    exact, hi, lo = value.reshape(-1), streamed.view(-1), host.low(entry).view(-1)
    pieces = [slice(start, start + PIECE_ELEMS) for start in range(0, exact.numel(), PIECE_ELEMS)]
    for done in [pool.submit(halves.split, exact[p], hi=hi[p], lo=lo[p]) for p in pieces]:
        done.result()


def _materialise(model: Any, names: tuple[str, ...], *, room: Tensor | None) -> Tensor:
    """Make one tensor real, full of NaN, under all of its names."""
    old = _get(model, names[0])
    value = torch.empty_like(old, device="cpu") if room is None else room
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
