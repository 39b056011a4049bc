"""The router loss of a mixture of experts: Hugging Face's own function, once over a whole step.

Where Hugging Face hooks the routers is read from the model class; how it calls its function (experts, top-k)
and with what weight the loss counts are learnt by watching one call, so no config key is guessed.

Letters: T tokens of a pass (padding included), E experts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.model.passes import Pass
from megatrain.model.skeleton import LayerList
from megatrain.model.stubs import NotLayerwise

_FUNCTION = "load_balancing_loss_func"


@dataclass(frozen=True)
class RouterLoss:
    """`function(router logits per layer [T, E], attention_mask=[1, T] or None)`, and the weight of its result."""

    function: Callable[..., Tensor]
    coefficient: float


@dataclass(frozen=True)
class RouterRule:
    """One entry of a model's `_can_record_outputs["router_logits"]`: which modules give logits, and where."""

    target: type[nn.Module]
    index: int
    layer_name: str | None

    def matches(self, full_name: str, module: nn.Module) -> bool:
        inside = self.layer_name is None or f".{self.layer_name}." in f".{full_name}."
        return isinstance(module, self.target) and inside


class RouterTap:
    """Forward hooks on the routers of the real layers; `take` gives the logits of the layer that just ran."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []

    def attach(self, found: LayerList, *, rules: Sequence[RouterRule]) -> None:
        """Hook every router in the layers, as Hugging Face's own output recorder would match it."""
        for number, layer in enumerate(found.layers):
            for name, module in layer.named_modules():
                for rule in rules:
                    if rule.matches(f"{found.prefix}.{number}.{name}", module):
                        module.register_forward_hook(self._hook(rule.index))

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            self._logits.append(output[index] if isinstance(output, tuple) else output)

        return note

    def take(self) -> list[Tensor]:
        logits, self._logits = self._logits, []
        return logits


def router_rules(base: nn.Module) -> tuple[RouterRule, ...]:
    """The rules of the class of `base`, or none."""
    declared = getattr(type(base), "_can_record_outputs", None) or {}
    found = declared.get("router_logits", [])
    entries = found if isinstance(found, (list, tuple)) else [found]
    rules = []
    for entry in entries:
        if isinstance(entry, type):
            rules.append(RouterRule(entry, 1, None))
        elif entry.target_class is not None:
            name = entry.layer_name.strip(".") if entry.layer_name else None
            rules.append(RouterRule(entry.target_class, entry.index, name))
    return tuple(rules)


def learn_router_loss(model: Any, *, run: Callable[[dict[str, Any]], Any], rows: int, length: int) -> RouterLoss | None:
    """Watch the model compute its loss with router logits on. None if it never calls the router loss.

    run: calls the model with the given extra arguments on hidden states of [rows, length]; tensors on the CPU.
    """
    home = sys.modules[type(model).__module__]
    original = vars(home).get(_FUNCTION)
    if original is None:
        return None
    seen: list[inspect.BoundArguments] = []
    unit = torch.ones((), requires_grad=True)

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(inspect.signature(original).bind(*args, **kwargs))
        return unit

    setattr(home, _FUNCTION, watch)
    try:
        with torch.enable_grad():
            out = run({"output_router_logits": True, "labels": torch.zeros(rows, length, dtype=torch.int64)})
    finally:
        setattr(home, _FUNCTION, original)
    if not seen or out.loss is None:
        return None
    (weight,) = torch.autograd.grad(out.loss, unit)
    rest = {k: v for k, v in seen[0].arguments.items() if k not in ("gate_logits", "attention_mask")}
    if any(isinstance(v, Tensor) for v in rest.values()):
        raise NotLayerwise("the router loss takes tensors other than logits and mask")

    def loss(logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
        result: Tensor = original(gate_logits=logits, attention_mask=attention_mask, **rest)
        return result

    return RouterLoss(loss, _as_written(float(weight), model.config))


def _as_written(weight: float, config: Any) -> float:
    """The config's own number where one is `weight` in fp32 (0.001, not 0.0010000000474974513)."""
    for value in config.to_dict().values():
        if isinstance(value, float) and float(torch.tensor(value, dtype=torch.float32)) == weight:
            return value
    return weight


def step_router_loss(router: RouterLoss, *, passes: Sequence[Pass], grad: bool) -> Tensor | None:
    """The router loss over all tokens of all passes, padding masked; None if no router gave logits.

    With `grad`, coefficient * d(loss)/d(logits) is left in the passes for their backward.
    """
    if not any(passes[0].router_logits):
        return None
    with torch.set_grad_enabled(grad):
        leaves = [[[t.detach().requires_grad_(grad) for t in layer] for layer in p.router_logits] for p in passes]
        per_router = [
            torch.cat([pass_leaves[i][k].flatten(0, -2) for pass_leaves in leaves])
            for i, layer in enumerate(leaves[0])
            for k in range(len(layer))
        ]
        loss = router.function(tuple(per_router), attention_mask=_mask(passes))
    if grad:
        flat = [t for pass_leaves in leaves for layer in pass_leaves for t in layer]
        found = iter(torch.autograd.grad(loss * router.coefficient, flat, allow_unused=True))
        for p, pass_leaves in zip(passes, leaves, strict=True):
            p.router_gradients = [[next(found) for _ in layer] for layer in pass_leaves]
    return loss.detach()


def _mask(passes: Sequence[Pass]) -> Tensor | None:
    """[1, T of all passes], 1 for real tokens; None if no pass has padding."""
    if all(p.batch.attention_mask is None for p in passes):
        return None
    masks = [
        p.batch.attention_mask if p.batch.attention_mask is not None else torch.ones_like(p.batch.input_ids)
        for p in passes
    ]
    return torch.cat([m.flatten() for m in masks]).unsqueeze(0)
