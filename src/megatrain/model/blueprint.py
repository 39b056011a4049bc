"""A model's structure, read once on the meta device, with stubs in the layers' places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from megatrain.model.anatomy import Anatomy
from megatrain.model.anatomy_of import Parts, build_anatomy, parts_of
from megatrain.model.experts import NotGroupable
from megatrain.model.grouping import Grouping, find_grouping
from megatrain.model.kinds import kinds_of
from megatrain.model.skeleton import LayerList, ModelSpec, build_skeleton, find_layers
from megatrain.model.slicing import NotSliceable, Slicing, find_slicing
from megatrain.model.stubs import Recorder, Stub
from megatrain.model.tiles import Tiling, find_tiling
from megatrain.model.trial import Trial, run_trial
from megatrain.model.unread import skip_unread


@dataclass(frozen=True)
class Blueprint:
    """What was found, and the skeleton that it was found on."""

    spec: ModelSpec
    model: Any  # its layers are stubs; the real ones are in `found`
    found: LayerList
    parts: Parts
    recorder: Recorder
    trial: Trial
    anatomy: Anatomy
    slicing: Slicing | None  # None: head and embedding can only be whole
    grouping: Grouping | NotGroupable  # NotGroupable: experts, if there are any, can only be whole
    tiling: Tiling | None  # None: layers can only run whole

    @classmethod
    def of(cls, spec: ModelSpec, *, parts_of_units: bool = True) -> Blueprint:
        """Raises ModelError for what cannot run exactly.

        parts_of_units: find out what the head, experts and MLPs can be cut into; it takes a while.
        """
        model = build_skeleton(spec)
        model.eval()
        found = find_layers(model, count=int(getattr(model.config, "num_hidden_layers", 0)))
        parts = parts_of(model, found=found)
        kinds = kinds_of(found.layers)
        recorder = Recorder(count=len(found.layers))
        stubs = [Stub(recorder, index=i, layer=layer) for i, layer in enumerate(found.layers)]
        setattr(found.owner, found.attribute, nn.ModuleList(stubs))
        trial = run_trial(model, found=found, parts=parts, recorder=recorder, kinds=kinds)
        grouping: Grouping | NotGroupable = NotGroupable("nobody asked whether its experts can come in groups")
        tiling = slicing = None
        if parts_of_units:
            grouping = _grouping(found, parts=parts, recorder=recorder, trial=trial, kinds=kinds)
            tiling = find_tiling(found=found, parts=parts, recorder=recorder, trial=trial, kinds=kinds)
        for layer, unread in zip(found.layers, trial.unread_in_layers, strict=True):
            skip_unread(layer, unread)
        anatomy = build_anatomy(
            parts,
            found=found,
            kinds=kinds,
            stem=trial.stem,
            tail=trial.tail,
            unused_in_layers=trial.unused_in_layers,
        )
        if parts_of_units:
            slicing = _slicing(model, parts=parts, recorder=recorder, trial=trial)
        return cls(spec, model, found, parts, recorder, trial, anatomy, slicing, grouping, tiling)


def _grouping(
    found: LayerList, *, parts: Parts, recorder: Recorder, trial: Trial, kinds: tuple[int, ...]
) -> Grouping | NotGroupable:
    try:
        return find_grouping(found=found, parts=parts, recorder=recorder, trial=trial, kinds=kinds)
    except NotGroupable as refusal:
        return refusal


def _slicing(model: Any, *, parts: Parts, recorder: Recorder, trial: Trial) -> Slicing | None:
    try:
        return find_slicing(model, parts=parts, recorder=recorder, trial=trial)
    except NotSliceable:
        return None
