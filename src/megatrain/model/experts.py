"""Experts of a mixture in groups: which layers can have them so, and how one group is run.

transformers keeps the experts of a layer fused, one row per expert in every parameter of one module, and that module's
forward knows tokens that are none of its experts' (for expert parallelism). So Hugging Face's own code computes what a
contiguous range of experts adds to each token: it is given those rows, and the choices of experts counted from there.

Letters: T tokens, D their width, K experts that a token chooses, E experts of a layer.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.anatomy_of import LayerParts
from megatrain.model.layout import FlatLayout, TensorSpec
from megatrain.model.sites import Sites

Answer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden states [T, D], choices [T, K] and their weights [T, K] to [T, D]."""

Run = Callable[[Mapping[str, Tensor], slice, Tensor, Tensor, Tensor], Tensor]
"""`Experts.run`."""


FEWEST = 2
"""Experts of a group. Hugging Face counts the tokens of each by `histc` from expert 0 to the last: where both are one
it would count all tokens, and on a GPU wait for their range."""


class NotGroupable(ModelError):
    """The experts of a layer can only come whole; the message says why."""


class ExpertCall:
    """Stands for the forward of a layer's experts: `answer` gets what they are called with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._signature = inspect.signature(type(module).forward)
        self._answer: Answer | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, chosen, weights = list(self._signature.bind(self._module, *args, **kwargs).arguments.values())[1:]
        if self._answer is None:
            raise RuntimeError("the experts of this layer come in groups, and nobody runs them")
        return self._answer(hidden, chosen, weights)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Within it the module's forward is `answer`."""
        self._module.forward = self
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None
            del self._module.forward


FUSED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""What transformers sets on a module of fused experts, from release 5.10 on."""

SWITCH = "_is_expert_parallel"
"""Whether a module may be given choices of experts that it does not hold. Before 5.18 it always may: no switch."""

CLEAN_BIASES = (5, 17)
"""The release from which rows of other experts' tokens are zero; what they held before got into gradients of biases."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer."""

    module: nn.Module
    names: tuple[str, ...]  # parameters of the layer, as its unit names them: [E, ...] each
    sites: Sites  # of those
    count: int  # E
    call: ExpertCall

    def run(
        self, tensors: Mapping[str, Tensor], span: slice, hidden: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """What the experts of `span` add to every token: [T, D] in the dtype of `hidden`.

        tensors: those experts' rows of every parameter. Other inputs as Hugging Face's router gives them.
        """
        mine, share = chosen_of(span, chosen, weights)
        self.sites.put(tensors)
        try:
            with self.being(span.stop - span.start):
                out: Tensor = type(self.module).forward(self.module, hidden, mine, share)
        finally:
            self.sites.clear()
        return out

    @contextmanager
    def being(self, count: int) -> Iterator[None]:
        """Within it the module takes itself for so many of all experts, and is given choices of others."""
        state = vars(self.module)
        before = {key: state[key] for key in ("num_experts", SWITCH) if key in state}
        # before 5.18 there is no such switch: choices of other experts are always reckoned with
        state.update({"num_experts": count, SWITCH: True})
        try:
            yield
        finally:
            for key in ("num_experts", SWITCH):
                state.pop(key)
            state.update(before)


def chosen_of(span: slice, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Choices counted from the first expert of `span`, those of others one past its last, with a weight of 0."""
    inside = (chosen >= span.start) & (chosen < span.stop)
    mine = torch.where(inside, chosen - span.start, span.stop - span.start)
    return mine, torch.where(inside, weights, torch.zeros_like(weights))


def find_experts(layer: nn.Module, *, parts: LayerParts) -> Experts | None:
    """The fused experts of `layer`; None if it has none. Raises NotGroupable for others."""
    found = [(path, module) for path, module in layer.named_modules() if all(hasattr(module, key) for key in FUSED)]
    if not found:
        _refuse_unknown(layer)
        return None
    if len(found) > 1:
        raise NotGroupable(f"{type(layer).__name__} has experts in {len(found)} places")
    path, module = found[0]
    kind, count = type(module).__name__, getattr(module, "num_experts", None)
    names = tuple(f"{path}.{name}" for name, _ in module.named_parameters())
    if not isinstance(count, int):
        raise NotGroupable(f"{kind} does not say how many experts it has")
    if count < 2 * FEWEST:
        raise NotGroupable(f"{kind} has no more than {count} experts")
    if any(name not in parts.tensors for name in names):
        raise NotGroupable(f"{kind} shares parameters with other layers")
    if any(parts.tensors[name].shape[:1] != (count,) for name in names) or list(module.buffers()):
        raise NotGroupable(f"{kind} holds tensors that are not divided by expert")
    if module.has_bias and _release() < CLEAN_BIASES:
        first = ".".join(map(str, CLEAN_BIASES))
        raise NotGroupable(f"{kind} has biases: transformers {transformers.__version__} is too old, {first} is needed")
    way = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if way != "grouped_mm":
        raise NotGroupable(f"{kind} runs as {way!r}, which not everywhere knows choices of other experts")
    return Experts(module, names, parts.sites.only(names), count, ExpertCall(module))


def _release() -> tuple[int, ...]:
    return tuple(int(number) for number in transformers.__version__.split(".")[:2])


def _refuse_unknown(layer: nn.Module) -> None:
    """Raise for stacks of matrices in a module named for experts that is none of transformers' fused kind."""
    for module in layer.modules():
        stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3]
        if stacked and "expert" in type(module).__name__.lower():
            raise NotGroupable(f"{type(module).__name__} is none of the fused experts of transformers")


@dataclass(frozen=True)
class ExpertGroups:
    """One layer's experts in groups: what is in which."""

    experts: Experts
    rest: FlatLayout  # of the layer without its experts
    spans: tuple[slice, ...]  # the experts of each group
    layouts: tuple[FlatLayout, ...]  # of each group's parameters
    run: Run  # experts.run, or the same compiled

    @classmethod
    def of(cls, experts: Experts, *, layout: FlatLayout, count: int, run: Run | None = None) -> ExpertGroups:
        """So many groups of the experts in a layer that has `layout`, but none of a single expert."""
        spans = spans_of(experts.count, groups=count)
        entries = [entry for entry in layout.params if entry.name in experts.names]
        layouts = tuple(
            FlatLayout.of(TensorSpec(e.name, (s.stop - s.start, *e.shape[1:]), e.dtype, True) for e in entries)
            for s in spans
        )
        return cls(experts, layout.without(*experts.names), spans, layouts, run or experts.run)


def spans_of(experts: int, *, groups: int) -> tuple[slice, ...]:
    """At most so many groups, as equal as can be, of at least FEWEST experts."""
    groups = min(groups, experts // FEWEST)
    base, longer = divmod(experts, groups)
    starts = [g * base + min(g, longer) for g in range(groups + 1)]
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(starts))


def find_all(layers: Sequence[nn.Module], *, parts: Sequence[LayerParts]) -> tuple[Experts | None, ...]:
    """Per layer its experts. Raises NotGroupable, also where layers' experts differ in shape or none has any."""
    found = tuple(find_experts(layer, parts=part) for layer, part in zip(layers, parts, strict=True))
    shapes = {
        tuple((part.tensors[name].shape, part.tensors[name].dtype) for name in one.names)
        for one, part in zip(found, parts, strict=True)
        if one is not None
    }
    if not shapes:
        raise NotGroupable("no layer has experts")
    if len(shapes) > 1:
        raise NotGroupable("layers have experts of different shapes")
    return found
