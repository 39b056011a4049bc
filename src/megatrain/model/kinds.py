"""Layers of one kind run the same code on the same layout: one compiled graph, one probe, for all of them.

Shapes alone are wrong: layers that alternate sliding and full attention, rotary and no rotary, or carry an
index-dependent scale have equal shapes. A kind is class, tensors, and every attribute of every submodule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_NAMES_OF_PLACE = frozenset({"layer_idx", "layer_index", "layer_id", "idx"})
_OF_MODULE = frozenset(nn.Module().__dict__) | {"_is_hf_initialized", "_is_stateful"}


def kinds_of(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Per layer the number of its kind, counted from 0 in order of first appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(_signature(layer), len(numbers)) for layer in layers)


def _signature(layer: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in layer.named_parameters():
        digest.update(repr((name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)).encode())
    for name, buffer in layer.named_buffers():
        digest.update(repr((name, _describe(buffer))).encode())
    for path, part in layer.named_modules():
        attributes = [(k, _describe(v)) for k, v in sorted(vars(part).items()) if k not in _NAMES_OF_PLACE | _OF_MODULE]
        digest.update(repr((path, type(part).__qualname__, attributes)).encode())
    return digest.hexdigest()


def _describe(value: Any) -> object:
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [_describe(v) for v in value]
    if isinstance(value, dict):
        return [(str(k), _describe(v)) for k, v in sorted(value.items(), key=lambda item: str(item[0]))]
    if isinstance(value, Tensor):
        return (tuple(value.shape), str(value.dtype), None if value.is_meta else value.flatten().tolist())
    name = getattr(value, "__qualname__", None)  # functions and classes by name, objects by their type
    return name if name is not None else type(value).__qualname__
