"""Stand-ins for the decoder layers: they note what Hugging Face's forward calls each layer with.

The model's own forward runs with a stub in every layer's place. In a recording run stub i keeps its arguments
and hands the hidden states on; in an injecting run (the tail) the last stub hands given hidden states on.
Whatever does not fit "one chain of hidden states, everything else known before the first layer" is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatrain.errors import ModelError


class NotLayerwise(ModelError):
    """The model's forward does something between, or through, its layers that a replay would lose."""


class _ExtraOutput:
    """Stands for what a layer returns beside its hidden states; no later layer may be given it."""


_EXTRA = _ExtraOutput()
RETURN_FORMS: tuple[Callable[[Tensor], Any], ...] = (
    lambda h: h,
    lambda h: (h,),
    lambda h: (h, _EXTRA),
    lambda h: (h, _EXTRA, _EXTRA),
)
"""What a layer may return; which one a model expects is found by trial."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
HIDDEN_NAMES = ("hidden_states", "hidden_state")


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one layer. `where` is the place of the hidden states among them."""

    where: int | str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        value = self.args[self.where] if isinstance(self.where, int) else self.kwargs[self.where]
        if not isinstance(value, Tensor):
            raise TypeError(f"the hidden states of a layer are a {type(value).__name__}")  # the wrong return form
        return value

    def others(self) -> dict[int | str, Any]:
        """Every argument but the hidden states."""
        every: dict[int | str, Any] = dict(enumerate(self.args))
        every.update(self.kwargs)
        every.pop(self.where)
        return every


class Recorder:
    """What all stubs of a model share: the mode, the notes of a run, and the chain check."""

    def __init__(self, *, count: int) -> None:
        self.count = count
        self.form = 0  # index into RETURN_FORMS
        self.disturb = False  # trial only: hand on other values, to see whether any argument follows them
        self.calls: list[LayerCall] = []
        self.handed_on: list[Tensor] = []
        self._inject: Tensor | None = None
        self._seen = 0

    def record(self, run: Callable[[], object]) -> list[LayerCall]:
        """Run the model's stem and return the call of each layer. Raises NotLayerwise."""
        self.calls, self.handed_on, self._seen, self._inject = [], [], 0, None
        run()
        if self._seen != self.count:
            raise NotLayerwise(f"{self._seen} layer calls in a model of {self.count} layers")
        calls, self.calls = self.calls, []
        return calls

    def inject(self, hidden: Tensor, *, run: Callable[[], Any]) -> Any:
        """Run the model with `hidden` as the output of the last layer and return its result."""
        self.calls, self.handed_on, self._seen, self._inject = [], [], 0, hidden
        try:
            return run()
        finally:
            self._inject = None
            self.handed_on = []

    def take(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by stub `index` in place of its layer."""
        if index != self._seen:
            raise NotLayerwise(
                f"layer {index} is called as number {self._seen} of the pass (a loop, or layer skipping)"
            )
        where: int | str = 0 if args else next((n for n in HIDDEN_NAMES if n in kwargs), "")
        if where == "":
            raise NotLayerwise(f"layer {index} is called without hidden states")
        call = LayerCall(where, args, kwargs)
        hidden = call.hidden
        if self.handed_on and not _same(hidden, self.handed_on[-1]):
            raise NotLayerwise(f"the input of layer {index} is not the output of layer {index - 1}")
        if self._inject is None:
            self._refuse_extra_outputs(index, args, kwargs)
            self.calls.append(call)
            out = hidden * 0.5 + 1 if self.disturb else hidden.view_as(hidden)
        else:
            out = self._inject if index == self.count - 1 else hidden.view_as(hidden)
        self.handed_on.append(out)
        self._seen += 1
        return RETURN_FORMS[self.form](out)

    def _refuse_extra_outputs(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if value is _EXTRA or (
                isinstance(value, (tuple, list)) and any(leaf is _EXTRA for leaf in pytree.tree_leaves(value))
            ):
                raise NotLayerwise(f"a second output of layer {index - 1} feeds layer {index}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape and a.stride() == b.stride() and a.data_ptr() == b.data_ptr() and a.device == b.device
    )


class Stub(nn.Module):
    """Stands in the layer list. Attributes that a model reads from its layers come from the real one."""

    def __init__(self, recorder: Recorder, *, index: int, layer: nn.Module) -> None:
        super().__init__()
        # Past nn.Module.__setattr__: the real layer must not become a child (its parameters are not here).
        object.__setattr__(self, "_recorder", recorder)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_layer", (layer,))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_recorder"].take(self.__dict__["_index"], args, kwargs)


def shared_mappings(calls: Sequence[LayerCall]) -> tuple[str, ...]:
    """Names of arguments that are one mutable mapping handed to every layer: state that layers write and read.

    Not `dict` alone: a UserDict taken for a constant gives the right loss and wrong gradients.
    """
    if len(calls) < 2:
        return tuple(name for name, value in calls[0].kwargs.items() if isinstance(value, MutableMapping))
    return tuple(
        name
        for name, value in calls[0].kwargs.items()
        if isinstance(value, MutableMapping) and all(c.kwargs.get(name) is value for c in calls)
    )


def refuse_opaque(calls: Sequence[LayerCall], *, shared: Sequence[str]) -> None:
    """Raise NotLayerwise if an argument is neither tensors nor plain values: it could hide state."""
    for index, call in enumerate(calls):
        for name, value in call.others().items():
            if name in shared:
                continue
            for leaf in pytree.tree_leaves(value):
                if not isinstance(leaf, (Tensor, *PLAIN)):
                    _refuse_argument(index, name, leaf)


def _refuse_argument(index: int, name: int | str, leaf: object) -> NoReturn:
    raise NotLayerwise(f"argument {name!r} of layer {index} is a {type(leaf).__name__}, which could carry state")
