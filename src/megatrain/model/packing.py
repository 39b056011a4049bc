"""Do documents packed into one row stay apart? One layer of each kind is asked, with numbers.

Hugging Face isolates documents by the attention mask that it derives from restarting positions, for most
families. A check of masks alone misses state that leaks beside a correct mask (recurrent and convolutional
mixers), so the probe changes document 1 at a layer's input and looks whether document 2 moves at its output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from megatrain.model.anatomy_of import LayerParts, Parts, hollow
from megatrain.model.batch import MicroBatch
from megatrain.model.skeleton import LayerList
from megatrain.model.stubs import LayerCall

FIRST, SECOND = 9, 15  # tokens of the two documents of the probe's row
MOVED = 1e-4  # of the largest output; real leaks are a hundred times larger, rounding a hundred times smaller
_LARGE = 1 << 24  # elements; stacked experts above this take no memory (they work token by token)


def document_masks(config: Any, *, position_ids: Tensor, dtype: torch.dtype) -> Any:
    """Masks for packed rows as Hugging Face builds them for generation: a tensor, or one per layer type.

    For families whose own forward does not look at position_ids. A single 4-D mask would lose sliding windows.
    """
    rows, length = position_ids.shape
    shape_only = torch.empty((), dtype=dtype, device=position_ids.device).expand(rows, length, 1)
    build = masking_utils.create_masks_for_generate
    cache = {name: None for name in ("cache", "past_key_values") if name in inspect.signature(build).parameters}
    return build(config, inputs_embeds=shape_only, attention_mask=None, position_ids=position_ids, **cache)


def leaking_layers(
    record: Callable[[MicroBatch], list[LayerCall]],
    *,
    found: LayerList,
    parts: Parts,
    kinds: Sequence[int],
    shared: Sequence[str],
) -> tuple[int, ...]:
    """The first layer of each kind that lets documents see each other; layer 0 if the stem already does.

    record: runs the model's stem, with outer weights bound, and returns the layers' calls.
    """
    row = probe_row()
    tokens, positions = row.input_ids, probe_positions()
    with torch.no_grad():
        alone = record(_row(tokens[:, FIRST:], positions[:, FIRST:]))[0].hidden
        calls = record(row)  # last: the layers below attend within its documents
    in_row = calls[0].hidden.narrow(alone.dim() - 2, FIRST, SECOND)
    if not torch.allclose(in_row.float(), alone.float(), rtol=MOVED, atol=MOVED * float(alone.float().abs().max())):
        return (0,)  # positions are not taken from position_ids
    probe = PackingProbe(calls, shared=shared)
    leaking: list[int] = []
    seen: set[int] = set()
    for index, kind in enumerate(kinds):
        if kind in seen and not shared:
            continue
        leaks = probe.leaks(index, layer=found.layers[index], parts=parts.layers[index])
        if leaks and kind not in seen:
            leaking.append(index)
        seen.add(kind)
    return tuple(leaking)


def probe_positions() -> Tensor:
    """position_ids of two documents in one row, [1, FIRST + SECOND]."""
    return torch.cat([torch.arange(FIRST), torch.arange(SECOND)]).unsqueeze(0)


def probe_row() -> MicroBatch:
    """The row that packing is probed with."""
    return _row(torch.arange(FIRST + SECOND).unsqueeze(0) % 3, probe_positions())


def _row(tokens: Tensor, positions: Tensor) -> MicroBatch:
    return MicroBatch(tokens, tokens, positions, None, tokens.numel(), tokens.numel())


def striped(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same shape that holds one column, expanded: rows differ, next to no memory."""
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return hollow(tensor).detach()
    column = torch.rand(tensor.shape[0], generator=torch.Generator().manual_seed(1)).to(tensor.dtype)
    return column.view(-1, *[1] * (tensor.dim() - 1)).expand(tensor.shape)


class _NoExperts(TorchFunctionMode):
    """Grouped products give zeros: experts see one token at a time and cannot mix documents."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._grouped_mm:
            return args[0].new_zeros((args[0].shape[0], args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


class PackingProbe:
    """Runs single layers on a row of two documents, on the CPU, with made-up weights."""

    def __init__(self, calls: Sequence[LayerCall], *, shared: Sequence[str]) -> None:
        self._calls = calls
        self._state: dict[str, dict[Any, Any]] = {name: {} for name in shared}
        self._noise = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))

    def leaks(self, index: int, *, layer: nn.Module, parts: LayerParts) -> bool:
        """Whether document 2 moves at the output of layer `index` when document 1 changes at its input."""
        weights = {name: self._filled(tensor) for name, tensor in parts.tensors.items()}
        shape = self._calls[index].hidden.shape
        hidden = self._tiled(shape, start=0).to(self._calls[index].hidden.dtype)
        other = hidden.clone()
        axis = hidden.dim() - 2
        # Fresh noise: attention without positions would not notice a permutation, a norm no scale or shift.
        fresh = self._tiled(shape, start=499_979).to(hidden.dtype)
        other.narrow(axis, 0, FIRST).copy_(fresh.narrow(axis, 0, FIRST))
        parts.sites.put(weights)
        try:
            with torch.no_grad(), _NoExperts():
                changed, _ = self._run(index, layer, other)
                out, written = self._run(index, layer, hidden)
        finally:
            parts.sites.clear()
        for name, entries in written.items():
            self._state[name].update(entries)
        moved = (out - changed).narrow(axis, FIRST, SECOND).abs().max()
        return not bool(moved <= MOVED * out.abs().max())  # NaN counts as a leak

    def _run(self, index: int, layer: nn.Module, hidden: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        call = self._calls[index]
        args, kwargs = list(call.args), dict(call.kwargs)
        live: dict[str, MutableMapping[Any, Any]] = {}
        for name, entries in self._state.items():
            live[name] = type(call.kwargs[name])()
            for key, value in entries.items():
                live[name][key] = value
        kwargs.update(live)
        if isinstance(call.where, int):
            args[call.where] = hidden
        else:
            kwargs[call.where] = hidden
        out = layer(*args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out).float(), live

    def _filled(self, tensor: Tensor) -> Tensor:
        """Values of a plausible size: matrices keep the scale of their input, vectors are near one."""
        if tensor.dim() == 3 and tensor.numel() > _LARGE:
            return hollow(tensor).detach()
        if not tensor.is_floating_point():
            return torch.zeros_like(tensor, device="cpu")
        flat = self._tiled(tensor.shape, start=0)
        scaled = flat / max(tensor.shape[-1], 1) ** 0.5 if tensor.dim() > 1 else 1 + 0.1 * flat
        return scaled.to(tensor.dtype)

    def _tiled(self, shape: torch.Size, *, start: int) -> Tensor:
        """Noise of `shape`; its period is a prime, so no two rows of a matrix are alike."""
        count = start + shape.numel()
        return self._noise.repeat(-(-count // self._noise.numel()))[start:count].view(shape)
