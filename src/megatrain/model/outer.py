"""Hugging Face's model around its layers: what runs before them and behind them, and the tensors that it runs on.

Stubs stand in the layers' places (stubs.py). Parameters and persistent buffers outside the layers are on the meta
device until they are bound; of a model bound for slices the embedding is rows, and the head one slice at a time.

Letters: D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.model.attention import VARLEN, Documents
from megatrain.model.batch import MicroBatch
from megatrain.model.blueprint import Blueprint
from megatrain.model.packing import document_masks, striped
from megatrain.model.rows_and_slices import BoundSlices
from megatrain.model.sites import Sites
from megatrain.model.sliced_tail import SliceableHead
from megatrain.model.stubs import LayerCall
from megatrain.model.tail import Head


class OuterModel:
    """Owns nothing: it runs on the tensors of the latest `bind` or `bind_sliced`, until `unbind`."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._model, self._layers = blueprint.model, blueprint.found.layers
        self._recorder, self._trial = blueprint.recorder, blueprint.trial
        self._sites = Sites(blueprint.parts.outer_sites)
        self._training: bool | None = None
        self._slices: BoundSlices | None = None
        self.explicit_masks = False  # packed rows: give the model its masks, for it does not look at positions
        self.bound: Mapping[str, Tensor] = {}  # by name, as the model sees them
        self.stem_names: tuple[str, ...] = ()  # "stem:...", in layout order
        self.stem_parameters: tuple[Tensor, ...] = ()
        self.head = self._no_head()
        self.sliced_head: SliceableHead | None = None  # None: bound whole, or not at all

    @property
    def attention(self) -> str:
        """The attention in use: the spec's, or what it fell back to."""
        return str(self._model.config._attn_implementation)

    # -- its tensors --------------------------------------------------------------------------------------

    def bind(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor]) -> None:
        """Make the given tensors (views of what stays on the device) the parameters and persistent buffers."""
        self._unbind_slices()
        anatomy = self._blueprint.anatomy
        owners = {entry.name: "stem" for entry in anatomy.stem.layout.params}
        owners |= {entry.name: "tail" for entry in anatomy.tail.layout.params}
        bound = {n: nn.Parameter(t) if n in owners else t for n, t in (*stem.items(), *tail.items())}
        self._sites.put(bound)
        self.bound = bound
        self.stem_names = tuple(f"stem:{entry.name}" for entry in anatomy.stem.layout.params)
        self.stem_parameters = tuple(bound[entry.name] for entry in anatomy.stem.layout.params)
        in_tail = [n for n in owners if n in self._trial.tail]
        self.head = Head(
            self.logits,
            self._blueprint.spec.compile,
            tuple(f"{owners[n]}:{n}" for n in in_tail),
            tuple(bound[n] for n in in_tail),
        )

    def bind_sliced(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor], rows: Tensor) -> BoundSlices:
        """`bind` without the embedding, for which `rows` [most rows, D] stands, and without the head's weight."""
        slicing = self._blueprint.slicing
        if slicing is None:
            raise RuntimeError(f"the head of {self._blueprint.spec.config.model_type} cannot be sliced")
        missing = {} if slicing.tied else {slicing.head.name: self._blueprint.parts.outer[slicing.head.name]}
        self.bind(stem={**stem, slicing.embedding.name: rows}, tail={**tail, **missing})
        self._slices = BoundSlices(slicing, bound=self.bound, run=self.logits)
        self.sliced_head = self._slices.head(self.head)
        return self._slices

    def bind_made_up(self) -> None:
        """For probes of what layers are called with: tensors on the CPU that take next to no memory."""
        self._sites.put({n: striped(t) for n, t in self._blueprint.parts.outer.items()})

    def unbind(self) -> None:
        """Forget the bound tensors, so that their memory can go; they may be bound again."""
        self._unbind_slices()
        self._sites.clear()
        self.bound, self.stem_parameters, self.head = {}, (), self._no_head()

    def _unbind_slices(self) -> None:
        if self._slices is not None:
            self._slices.remove()
            self._slices = self.sliced_head = None

    def _no_head(self) -> Head:
        return Head(self.logits, self._blueprint.spec.compile, (), ())

    def buffers_to(self, device: torch.device) -> None:
        """Move the computed buffers (rotary tables, scales), the layers' too. Persistent ones come by binding."""
        for root in (self._model, *self._layers):
            for part in root.modules():
                for name in part._non_persistent_buffers_set:
                    buffer = part._buffers.get(name)
                    if buffer is not None:
                        part._buffers[name] = buffer.to(device)

    # -- its runs -----------------------------------------------------------------------------------------

    def set_training(self, training: bool) -> None:
        """Dropout on or off, in the layers too."""
        if self._training is training:
            return
        self._training = training
        for root in (self._model, *self._layers):
            root.train(training)

    def documents(self, batch: MicroBatch) -> Documents | None:
        """What the attention needs to know of a batch before it leaves the CPU; None if it does not ask."""
        return Documents.of(batch) if self.attention == VARLEN else None

    def record(self, batch: MicroBatch) -> list[LayerCall]:
        """Run the stem on `batch`, and return what each layer is called with."""
        inputs = self._inputs(batch)
        return self._recorder.record(lambda: self._trial.base(**inputs, **self._trial.flags))

    def logits(self, hidden: Tensor) -> Tensor:
        """Run what is behind the last layer on its output."""
        shape = hidden.shape[-3:-1] if self._trial.full_length_tail else (1, 1)
        dummy = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
        out = self._recorder.inject(hidden, run=lambda: self._model(input_ids=dummy, **self._trial.flags))
        logits: Tensor = out.logits
        return logits

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.attention_mask is not None and not batch.packed and self.attention != VARLEN:
            inputs["attention_mask"] = batch.attention_mask
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
            if self.explicit_masks:
                inputs["attention_mask"] = document_masks(
                    self._model.config, position_ids=batch.position_ids, dtype=self._blueprint.spec.precision
                )
        return inputs
