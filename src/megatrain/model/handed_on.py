"""State that layers hand on beside the hidden states: mappings that every layer of a pass is given, reads and writes.

A layer may run again long after the layers behind it have written, so each is given fresh mappings with what was there
before it. What a layer wrote is an output of it, and an input of the layers that read it: gradients pass from these
to that one by the identity of the written tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from megatrain.model.stubs import LayerCall

State = dict[str, dict[Any, Any]]  # argument name -> entries of the mapping that every layer sees


@dataclass(frozen=True)
class Given:
    """The state as one layer is given it."""

    before: State  # what `live` held when the layer was given it
    live: Mapping[str, MutableMapping[Any, Any]]  # of the model's own types, for the layer to read and write
    leaves: Mapping[int, Tensor]  # of a run with a graph, by the id of the value they stand for


class HandedOn:
    """The state of one pass. A model without any has none of this: mappings and gradients are empty."""

    def __init__(self, calls: Sequence[LayerCall], *, shared: Sequence[str]) -> None:
        """shared: names of the arguments that are such mappings."""
        self._types = {name: type(calls[0].kwargs[name]) for name in shared}
        self._states: list[State] = [{name: {} for name in shared}]  # before layer i; the last one is current
        self._gradients: dict[int, Tensor] = {}  # by the id of the written tensor

    def give(self) -> Given:
        """To the next layer of the forward, which runs without a graph."""
        state = self._states[-1]
        return Given(state, self._live(state), {})

    def give_leaves(self, layer: int) -> Given:
        """To a layer that runs with a graph: what it reads are leaves."""
        leaves: dict[int, Tensor] = {}
        before = _map_state(
            self._states[layer] if self._types else {},
            lambda t: leaves.setdefault(id(t), t.detach().requires_grad_(True)),
        )
        return Given(before, self._live(before), leaves)

    def take(self, given: Given) -> None:
        """Note what the next layer of the forward left in what it was given: it is current now."""
        if self._types:
            self._states.append(_after(self._states[-1], given))

    def written(self, layer: int, given: Given) -> Iterator[tuple[Tensor, Tensor]]:
        """What the layer wrote in a run with a graph, with its gradient, which came from the layers that read it."""
        for name, mapping in given.live.items():
            for key, value in mapping.items():
                if given.before[name].get(key) is value:
                    continue
                saved = self._states[layer + 1][name][key]
                for now, then in zip(pytree.tree_leaves(value), pytree.tree_leaves(saved), strict=True):
                    slope = self._gradients.pop(id(then), None) if isinstance(then, Tensor) else None
                    if slope is not None:
                        yield now, slope

    def add_gradients(self, given: Given, gradients: Sequence[Tensor | None]) -> None:
        """Add those of the leaves, in their order, to what the layers before have written."""
        for key, gradient in zip(given.leaves, gradients, strict=True):
            if gradient is not None:
                old = self._gradients.get(key)
                self._gradients[key] = gradient if old is None else old + gradient

    def release(self) -> None:
        """Let go of what was written."""
        self._states = []

    def _live(self, state: State) -> dict[str, MutableMapping[Any, Any]]:
        """Fresh mappings of the model's own type."""
        live: dict[str, MutableMapping[Any, Any]] = {}
        for name, kind in self._types.items():
            live[name] = kind()
            for key, value in state[name].items():
                live[name][key] = value
        return live


def _after(before: State, given: Given) -> State:
    """The state behind a layer: entries that it left alone are those of `before`, the others without a graph."""
    after: State = {}
    for name, mapping in given.live.items():
        after[name] = {
            key: before[name][key]
            if key in given.before[name] and given.before[name][key] is value
            else pytree.tree_map_only(Tensor, Tensor.detach, value)
            for key, value in mapping.items()
        }
    return after


def _map_state(state: State, f: Callable[[Tensor], Tensor]) -> State:
    return {n: {k: pytree.tree_map_only(Tensor, f, v) for k, v in m.items()} for n, m in state.items()}
