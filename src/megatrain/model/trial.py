"""A trial pass on the CPU with weights that take no memory: what the model does around its layers.

It answers, before any weight is loaded: what a layer returns, which arguments carry a graph, which outer
parameters the stem and the tail read, whether the layers form one chain; or refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megatrain.model.anatomy_of import Parts, hollow
from megatrain.model.attention import AttentionCall, watch_attention
from megatrain.model.aux import RouterLoss, RouterTap, learn_router_loss, router_rules
from megatrain.model.foreign import models_may_fail
from megatrain.model.graphs import depends_on, reached
from megatrain.model.rehearsal import LONG, SHORT, NoProducts, Rehearsal, Rehearsals, bytes_per_token, form_of
from megatrain.model.sites import Sites
from megatrain.model.skeleton import LayerList
from megatrain.model.stubs import RETURN_FORMS, LayerCall, NotLayerwise, Recorder, refuse_opaque, shared_mappings

TRIAL_ROWS, TRIAL_LENGTH = 2, 6


@dataclass(frozen=True)
class Trial:
    """What the trial pass found."""

    base: Callable[..., Any]  # the module whose forward holds the loop over the layers
    attention_calls: tuple[AttentionCall, ...]  # of our own attention, two of every layer that comes to it
    flags: dict[str, bool]  # given with every call: no cache, no router logits (ours are taken at the layers)
    router: RouterLoss | None  # None: the model has no router loss, or the config has it off
    tap: RouterTap
    shared: tuple[str, ...]  # names of mappings that all layers write and read
    stem: frozenset[str]  # outer parameters that the layers' inputs depend on
    tail: frozenset[str]  # outer parameters that the logits depend on
    full_length_tail: bool  # the head reshapes to the length of input_ids
    stochastic: bool  # dropout or router jitter somewhere
    forward_needs_grad: tuple[bool, ...]  # per layer, see rehearsal.py
    unused_in_layers: tuple[frozenset[str], ...]
    unread_in_layers: tuple[frozenset[str], ...]  # see unread.py; empty where the first forward runs with a graph
    hidden_shape: tuple[int, ...]  # of one row of one token: [1, 1, D], or [A, 1, 1, D]
    saved_bytes_per_token: int  # see ModelSizes
    widest_bytes_per_token: int


@models_may_fail
def run_trial(model: Any, *, found: LayerList, parts: Parts, recorder: Recorder, kinds: Sequence[int]) -> Trial:
    """Stubs are in place; outer tensors are on the meta device before and after. kinds: see kinds.py."""
    sites = Sites(parts.outer_sites)
    outer = {name: hollow(tensor) for name, tensor in parts.outer.items()}
    sites.put(outer)
    base = model.base_model if model.base_model is not model else found.owner
    ids = torch.arange(TRIAL_ROWS * TRIAL_LENGTH).view(TRIAL_ROWS, TRIAL_LENGTH) % 3
    wants_router = bool(getattr(model.config, "output_router_logits", False))
    flags = {"use_cache": False} | ({"output_router_logits": False} if wants_router else {})

    def stem() -> list[LayerCall]:
        return recorder.record(lambda: base(input_ids=ids, **flags))

    calls = _find_return_form(recorder, stem)
    shared = shared_mappings(calls)
    refuse_opaque(calls, shared=shared)
    stem_outputs = [calls[0].hidden, *_with_graph(calls, handed_on=recorder.handed_on)]
    _refuse_arguments_that_follow_the_layers(recorder, stem, calls=calls)
    trainable = {n: t for n, t in outer.items() if t.requires_grad}
    in_stem = reached(stem_outputs, leaves=trainable)
    hidden = calls[0].hidden.detach()
    logits, full_length = _trial_tail(model, recorder, hidden=hidden, flags=flags)
    router, tap = None, RouterTap()
    if wants_router:
        router = learn_router_loss(
            model,
            run=lambda extra: recorder.inject(hidden, run=lambda: model(input_ids=ids, **(flags | extra))),
            rows=TRIAL_ROWS,
            length=TRIAL_LENGTH,
        )
    in_tail = reached([logits], leaves=trainable)
    rehearse = partial(
        _rehearse, recorder, partial(base, **flags), found=found, parts=parts, shared=shared, kinds=kinds
    )
    with watch_attention() as attention_calls:
        short, long = rehearse(length=SHORT), rehearse(length=LONG)
    sites.clear()
    if router is not None:
        tap.attach(found, rules=router_rules(base))
    hidden_shape = list(calls[0].hidden.shape)
    hidden_shape[-3:-1] = [1, 1]
    return Trial(
        base=base,
        attention_calls=(*attention_calls, *_mirrored(attention_calls, found=found, of=[r.layer for r in short])),
        flags=flags,
        router=router,
        tap=tap,
        shared=shared,
        stem=in_stem,
        tail=in_tail,
        full_length_tail=full_length,
        stochastic=_stochastic(model, found),
        forward_needs_grad=tuple(r.bias_has_gradient for r in short),
        unused_in_layers=tuple(r.unused for r in short),
        unread_in_layers=tuple(frozenset() if r.bias_has_gradient else r.unread for r in short),
        hidden_shape=tuple(hidden_shape),
        saved_bytes_per_token=_most_per_token([r.saved_bytes for r in short], [r.saved_bytes for r in long]),
        widest_bytes_per_token=_most_per_token([r.widest_bytes for r in short], [r.widest_bytes for r in long]),
    )


def _most_per_token(short: Sequence[int], long: Sequence[int]) -> int:
    """Bytes that a token adds in the layer where it adds most."""
    return max(map(bytes_per_token, short, long))


@contextmanager
def rehearsing_again(trial: Trial, *, parts: Parts) -> Iterator[None]:
    """Outer tensors that take no memory are bound; afterwards nothing is, and the routers' logits are forgotten."""
    sites = Sites(parts.outer_sites)
    sites.put({name: hollow(tensor) for name, tensor in parts.outer.items()})
    try:
        yield
    finally:
        sites.clear()
        trial.tap.take()


def _find_return_form(recorder: Recorder, stem: Callable[[], list[LayerCall]]) -> list[LayerCall]:
    """Try what a layer may return until the model accepts it. Foreign errors count as "not this form"."""
    refusals: list[NotLayerwise] = []
    other: Exception | None = None
    for form in range(len(RETURN_FORMS)):
        recorder.form = form
        try:
            with torch.enable_grad():
                return stem()
        except NotLayerwise as refusal:
            refusals.append(refusal)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            other = error
    if refusals:
        raise refusals[-1]
    raise NotLayerwise(f"the model's forward does not run with stand-ins for its layers: {other}") from other


def _with_graph(calls: list[LayerCall], *, handed_on: list[Tensor]) -> list[Tensor]:
    """Tensors with a graph among the layers' arguments, beside the hidden states."""
    found: dict[int, Tensor] = {}
    chain = {id(t) for t in handed_on}
    for index, call in enumerate(calls):
        for name, value in call.others().items():
            for leaf in pytree.tree_leaves(value):
                if not isinstance(leaf, Tensor) or not leaf.requires_grad or id(leaf) in found:
                    continue
                if id(leaf) in chain or depends_on(leaf, sources=handed_on):
                    raise NotLayerwise(f"argument {name!r} of layer {index} is computed from an earlier layer's output")
                found[id(leaf)] = leaf
    return list(found.values())


def _refuse_arguments_that_follow_the_layers(
    recorder: Recorder, stem: Callable[[], list[LayerCall]], *, calls: list[LayerCall]
) -> None:
    """Run again with other layer outputs: an argument that changes without a graph is still no constant."""
    recorder.disturb = True
    try:
        with torch.no_grad():
            again = stem()
    finally:
        recorder.disturb = False
    for index, (first, second) in enumerate(zip(calls, again, strict=True)):
        names = first.others().keys()
        for name in names:
            one, two = pytree.tree_leaves(first.others()[name]), pytree.tree_leaves(second.others()[name])
            for a, b in zip(one, two, strict=True):
                if isinstance(a, Tensor) and not torch.equal(a, b):
                    raise NotLayerwise(f"argument {name!r} of layer {index} follows the output of earlier layers")


def _trial_tail(model: Any, recorder: Recorder, *, hidden: Tensor, flags: dict[str, bool]) -> tuple[Tensor, bool]:
    """Logits of the injected hidden states, and whether the head needs input_ids of the same length."""
    rows, length = hidden.shape[-3:-1]
    reason: Exception | None = None
    for full in (False, True):
        dummy = torch.zeros((rows, length) if full else (1, 1), dtype=torch.int64)
        try:
            with torch.enable_grad(), NoProducts():
                leaf = hidden.detach().requires_grad_(True)
                out = recorder.inject(leaf, run=partial(model, input_ids=dummy, **flags))
        except (RuntimeError, ValueError) as error:
            reason = error
            continue
        if out.logits.shape[:2] == (rows, length):
            return out.logits, full
    raise NotLayerwise(f"the head does not run on hidden states alone: {reason}")


def _rehearse(
    recorder: Recorder,
    base: Callable[..., Any],
    *,
    found: LayerList,
    parts: Parts,
    shared: tuple[str, ...],
    kinds: Sequence[int],
    length: int,
) -> list[Rehearsal]:
    """Per layer what it showed, or what the first of its kind showed that was called alike.

    Where layers hand state on, each is rehearsed: the next one needs what it leaves.
    """
    rehearsals = Rehearsals.of_row(recorder, base, length=length, shared=shared)
    known: dict[object, Rehearsal] = {}
    shown = []
    for i, (layer, part) in enumerate(zip(found.layers, parts.layers, strict=True)):
        form = i if shared else (kinds[i], form_of(rehearsals.calls[i]))
        if form not in known:
            known[form] = rehearsals.run(i, layer=layer, parts=part)
        shown.append(known[form])
    return shown


def _mirrored(seen: Sequence[AttentionCall], *, found: LayerList, of: Sequence[int]) -> Iterator[AttentionCall]:
    """The attention calls of layers that another one, `of` each, was rehearsed for."""
    for index, other in enumerate(of):
        if other != index:
            paths = {id(module): path for path, module in found.layers[other].named_modules()}
            for call in seen:
                if id(call.module) in paths:
                    yield call._replace(module=found.layers[index].get_submodule(paths[id(call.module)]))


def _stochastic(model: Any, found: LayerList) -> bool:
    """Whether anything in the model can draw random numbers in training mode: a dropout or jitter that is not 0."""
    for root in (model, *found.layers):
        for part in root.modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                return True
            for name, value in vars(part).items():
                if isinstance(value, float) and value > 0 and any(w in name for w in ("drop", "jitter", "noise")):
                    return True
    return any(
        isinstance(value, float) and value > 0 and any(w in name for w in ("drop", "jitter", "noise"))
        for name, value in model.config.to_dict().items()
    )
