"""What the stem gives to the layers: tensors with a graph behind them, cut off so that layers can be replayed.

The hidden states are the first; per-layer inputs, copies of the embeddings and the like follow. Each becomes a
leaf of the layers that read it, and an output of the stem when the gradients come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from megatrain.model.stubs import LayerCall


@dataclass(frozen=True)
class Prepared:
    """A layer's call, ready to be replayed. `externals`: which stem outputs (by number) its arguments hold."""

    call: LayerCall
    externals: tuple[int, ...]


class StemOutputs:
    """The stem's outputs of one pass, with graph (`outputs`), without (`values`), and their gradients."""

    def __init__(self, hidden: Tensor) -> None:
        self.outputs = [hidden]
        self.values = [hidden.detach()]
        self.gradients: list[Tensor | None] = [None]
        self._numbers = {id(hidden): 0}

    def add_gradient(self, number: int, gradient: Tensor | None) -> None:
        """Add to the gradient of output `number`."""
        if gradient is not None:
            old = self.gradients[number]
            self.gradients[number] = gradient if old is None else old + gradient

    def release(self) -> None:
        """Let go of graph, values and gradients."""
        self.outputs, self.values, self.gradients = [], [], []

    def detach(self, calls: Sequence[LayerCall], *, shared: Sequence[str]) -> list[Prepared]:
        """The calls with every tensor that has a graph replaced by its detached value, hidden states taken out."""
        plain: set[int] = set()  # arguments known to hold no graph; layers mostly share the same objects
        return [self._detach_call(call, shared=shared, plain=plain) for call in calls]

    def _detach_call(self, call: LayerCall, *, shared: Sequence[str], plain: set[int]) -> Prepared:
        used: list[int] = []
        changed: dict[int | str, Any] = {}

        def substitute(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            number = self._number(tensor)
            used.append(number)
            return self.values[number]

        for name, value in call.others().items():
            if name in shared or value is None or id(value) in plain:
                continue
            before = len(used)
            new = pytree.tree_map_only(Tensor, substitute, value)
            if len(used) == before:
                plain.add(id(value))
            else:
                changed[name] = new
        args = tuple(None if i == call.where else changed.get(i, v) for i, v in enumerate(call.args))
        kwargs = {k: None if k == call.where or k in shared else changed.get(k, v) for k, v in call.kwargs.items()}
        return Prepared(LayerCall(call.where, args, kwargs), tuple(dict.fromkeys(used)))

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.outputs)
            self.outputs.append(tensor)
            self.values.append(tensor.detach())
            self.gradients.append(None)
        return number
