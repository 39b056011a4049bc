"""Attention tried out on a twin of the model: does ours serve the family, and do documents of a row stay apart?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from megatrain.errors import ModelError
from megatrain.model.attention import VARLEN, Window, set_windows, trial_config, use_documents, varlen_windows
from megatrain.model.batch import MicroBatch
from megatrain.model.blueprint import Blueprint
from megatrain.model.outer import OuterModel
from megatrain.model.packing import leaking_layers, probe_positions, probe_row
from megatrain.model.skeleton import ModelSpec
from megatrain.model.stubs import LayerCall


def fitting_blueprint(spec: ModelSpec) -> Blueprint:
    """The model's structure with the attention of `spec`. Raises ModelError for what cannot run exactly.

    Attention ``megatrain_varlen`` falls back to Hugging Face's default where the family is not made for it.
    """
    if spec.attention != VARLEN:
        return Blueprint.of(spec)
    fallback = replace(spec, attention="auto")
    windows = _varlen_windows(fallback)
    if windows is None:
        return Blueprint.of(fallback)
    try:
        found = Blueprint.of(spec)
    except ModelError:
        return Blueprint.of(fallback)
    seen = found.trial.attention_calls
    usable = set_windows(found.found.layers, windows=windows, seen=seen, training=spec.training)
    return found if usable else Blueprint.of(fallback)


def leaking(spec: ModelSpec, *, kinds: Sequence[int], explicit_masks: bool) -> tuple[int, ...]:
    """First layer of each kind that lets packed documents see each other; see `OuterModel.explicit_masks`.

    Layer 0 if the model does not take what tells documents apart.
    """
    twin = fitting_blueprint(replace(spec, training=False, compile=False))
    outer = OuterModel(twin)
    outer.explicit_masks = explicit_masks
    outer.bind_made_up()
    try:
        return leaking_layers(
            partial(_calls, outer),
            found=twin.found,
            parts=twin.parts,
            kinds=kinds,
            shared=twin.trial.shared,
        )
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return (0,)


def _varlen_windows(spec: ModelSpec) -> tuple[Window | None, ...] | None:
    """Per layer the window of its masks, read off a twin that has sdpa and a small window; None: not for varlen."""
    twin = replace(spec, config=trial_config(spec.config), attention="sdpa", training=False, compile=False)
    try:
        outer = OuterModel(Blueprint.of(twin, parts_of_units=False))
    except ModelError:
        return None
    outer.bind_made_up()
    with torch.no_grad():
        calls = _calls(outer, probe_row())
    return varlen_windows(calls, config=spec.config, position_ids=probe_positions())


def _calls(outer: OuterModel, batch: MicroBatch) -> list[LayerCall]:
    """What the layers are called with, attention within the documents of the batch."""
    use_documents(outer.documents(batch))
    return outer.record(batch)
