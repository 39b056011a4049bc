"""Where tensors sit in a module tree, so that others can be put in their place without a copy.

A *site* is one entry of a module's `_parameters` or `_buffers`; a tensor tied under several names has several.
Writing the dictionaries directly costs a few microseconds a layer; `functional_call` costs a hundred times that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

Site = tuple[dict[str, Any], str]


class Sites:
    """Named places of a module's tensors. `put` fills them, `clear` puts the meta tensors back."""

    def __init__(self, places: Mapping[str, Iterable[Site]]) -> None:
        self._places = {name: tuple(sites) for name, sites in places.items()}
        self._flat = tuple((name, holder, key) for name, sites in self._places.items() for holder, key in sites)
        self._meta = tuple((holder, key, holder[key]) for _, holder, key in self._flat)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def only(self, names: Iterable[str]) -> Sites:
        """The places of some of the tensors, which are on the meta device."""
        return Sites({name: self._places[name] for name in names})

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind each named place to its tensor. Raises KeyError when one is missing."""
        for name, holder, key in self._flat:
            holder[key] = tensors[name]

    def clear(self) -> None:
        """Forget the bound tensors, so that no view of a slot outlives its use."""
        for holder, key, tensor in self._meta:
            holder[key] = tensor


def tensor_sites(module: nn.Module) -> dict[int, list[tuple[str, Site]]]:
    """id(tensor) -> every (full name, site) of a parameter or buffer in `module`, in registration order."""
    found: dict[int, list[tuple[str, Site]]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for holder in (part._parameters, part._buffers):
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                places = found.setdefault(id(tensor), [])
                if not any(h is holder and k == key for _, (h, k) in places):
                    places.append((name, (holder, key)))
    return found


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds, by name, each tensor once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is None or key in part._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{path}.{key}" if path else key] = buffer
    return found
