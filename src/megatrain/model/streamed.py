"""A Hugging Face decoder whose layers' weights come as arguments: the model as the executor sees it.

The stem (embeddings, masks, rotary tables) and the tail (final norm, head) run as Hugging Face wrote them,
with stubs in the layers' places; each layer is its own Hugging Face module with a slot's views bound to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.attention import (
    VARLEN,
    Documents,
    Window,
    keepable,
    set_windows,
    trial_config,
    use_documents,
    varlen_windows,
)
from megatrain.model.aux import step_router_loss
from megatrain.model.batch import MicroBatch
from megatrain.model.blueprint import Blueprint
from megatrain.model.compiled import LayerFunction, compile_experts, compile_kinds
from megatrain.model.experts import ExpertGroups, NotGroupable
from megatrain.model.experts_pass import ExpertPass
from megatrain.model.grouping import Grouping
from megatrain.model.kept_attention import LSE_BYTES, Exchange, begin_exchange
from megatrain.model.packing import document_masks, leaking_layers, probe_positions, probe_row, striped
from megatrain.model.passes import Pass
from megatrain.model.rows_and_slices import BoundSlices
from megatrain.model.sites import Sites
from megatrain.model.sizes import model_sizes
from megatrain.model.sizes_types import ModelSizes
from megatrain.model.skeleton import ModelSpec, build_skeleton, refuse_by_type
from megatrain.model.sliced_tail import SliceableHead
from megatrain.model.stubs import LayerCall
from megatrain.model.tail import Head
from megatrain.model.tiles import set_tiles


class Rng(Protocol):
    """The default generator of the device that layers run on."""

    def get(self) -> object: ...

    def set(self, state: Any) -> None: ...


@dataclass(frozen=True)
class LayerPlan:
    """What a call of one layer needs, looked up once."""

    module: nn.Module
    sites: Sites
    trainable: tuple[str, ...]  # own parameters, in layout order
    shared_names: tuple[str, ...]  # "stem:..." of stem parameters that the layer reads
    shared_parameters: tuple[Tensor, ...]
    compiled: LayerFunction | None  # None: the module runs as it is


class StreamedModel:
    """Built once per run; `begin` starts a pass of one micro-batch."""

    def __init__(self, blueprint: Blueprint, *, rng: Rng) -> None:
        self.spec, self.anatomy, self.rng = blueprint.spec, blueprint.anatomy, rng
        self.slicing, self.grouping, self.tiling = blueprint.slicing, blueprint.grouping, blueprint.tiling
        self._model, self._found, self._parts = blueprint.model, blueprint.found, blueprint.parts
        self._recorder, self._trial = blueprint.recorder, blueprint.trial
        self.expert_groups: tuple[ExpertGroups | None, ...] = (None,) * len(self.anatomy.layers)
        self._tile_tokens = 0
        self._outer_sites = Sites(self._parts.outer_sites)
        self._training: bool | None = None
        self._explicit_masks = False  # packed rows: give the model its masks (see check_packing)
        self.stochastic = self.spec.training and self._trial.stochastic
        self.forward_needs_grad = self._trial.forward_needs_grad
        self.layer_plans: tuple[LayerPlan, ...] = ()
        self.stem_names: tuple[str, ...] = ()
        self.stem_parameters: tuple[Tensor, ...] = ()
        self.head = Head(self._logits, self.spec.compile, (), ())
        self.sliced_head: SliceableHead | None = None
        self._slices: BoundSlices | None = None

    @classmethod
    def build(cls, spec: ModelSpec, *, rng: Rng) -> StreamedModel:
        """Read the model's structure on the meta device. Raises ModelError for what cannot run exactly.

        Attention ``megatrain_varlen`` falls back to Hugging Face's default where the family is not made for it.
        """
        refuse_by_type(spec.config, trust_remote_code=spec.trust_remote_code)
        if spec.attention != VARLEN:
            return cls(Blueprint.of(spec), rng=rng)
        fallback = replace(spec, attention="auto")
        windows = _varlen_windows(fallback, rng=rng)
        if windows is None:
            return cls(Blueprint.of(fallback), rng=rng)
        try:
            built = cls(Blueprint.of(spec), rng=rng)
        except ModelError:
            return cls(Blueprint.of(fallback), rng=rng)
        seen = built._trial.attention_calls
        usable = set_windows(built._found.layers, windows=windows, seen=seen, training=spec.training)
        return built if usable else cls(Blueprint.of(fallback), rng=rng)

    @property
    def attention(self) -> str:
        """The attention in use: the spec's, or what it fell back to."""
        return str(self._model.config._attn_implementation)

    @cached_property
    def meta_model(self) -> nn.Module:
        """The whole model on the meta device, layers in place: for names, ties, config, initialisation, saving."""
        return build_skeleton(self.spec)

    def check_packing(self) -> None:
        """Make sure that documents packed into a row stay apart. Call it before the first packed batch.

        Raises ModelError naming the layers where they would not. Families that need explicit masks get them.
        """
        leaking = self._leaking_layers(masks=False)
        if not leaking:
            return
        if not self._leaking_layers(masks=True):
            self._explicit_masks = True
            return
        index = leaking[0]
        kind = self.anatomy.kinds[index]
        same = [i for i, k in enumerate(self.anatomy.kinds) if k == kind]
        raise ModelError(
            f"{type(self._found.layers[index]).__name__} (layers {', '.join(map(str, same))}) lets packed documents "
            f"see each other in model type {self.spec.config.model_type}",
            hint="set data.packing: false",
        )

    def _leaking_layers(self, *, masks: bool) -> tuple[int, ...]:
        """First layer of each kind that leaks, or layer 0 if the model does not take what tells documents apart."""
        fresh = StreamedModel.build(replace(self.spec, training=False, compile=False), rng=self.rng)
        fresh._explicit_masks = masks
        fresh._outer_sites.put({n: striped(t) for n, t in fresh._parts.outer.items()})
        try:
            return leaking_layers(
                fresh._record,
                found=fresh._found,
                parts=fresh._parts,
                kinds=self.anatomy.kinds,
                shared=fresh._trial.shared,
            )
        except (TypeError, ValueError, AttributeError, RuntimeError):
            return (0,)

    def documents(self, batch: MicroBatch) -> Documents | None:
        """What `begin` needs to know of a batch before it leaves the CPU; None if the attention does not ask."""
        return Documents.of(batch) if self.attention == VARLEN else None

    def _record(self, batch: MicroBatch) -> list[LayerCall]:
        use_documents(self.documents(batch))
        return self._record_stem(batch)

    def _record_stem(self, batch: MicroBatch) -> list[LayerCall]:
        inputs = self._inputs(batch)
        return self._recorder.record(lambda: self._trial.base(**inputs, **self._trial.flags))

    def outer_buffers_to(self, device: torch.device) -> None:
        """Move the computed buffers (rotary tables, scales) to where passes run. Persistent ones come by binding."""
        for root in (self._model, *self._found.layers):
            for part in root.modules():
                for name in part._non_persistent_buffers_set:
                    buffer = part._buffers.get(name)
                    if buffer is not None:
                        part._buffers[name] = buffer.to(device)

    def divide_experts(self, count: int) -> tuple[ExpertGroups | None, ...]:
        """From the next `bind_outer` on layers come without their experts, and those in at most `count` groups.

        0: experts come with their layer. Returns per layer its groups; None where it comes whole. Raises NotGroupable.
        """
        layers = self.anatomy.layers
        if not count:
            self.expert_groups = (None,) * len(layers)
            return self.expert_groups
        if isinstance(self.grouping, NotGroupable):
            raise self.grouping
        found = self.grouping.layers
        runs = compile_experts(found, kinds=self.anatomy.kinds) if self.spec.compile else (None,) * len(found)
        self.expert_groups = tuple(
            None if experts is None else ExpertGroups.of(experts, layout=unit.layout, count=count, run=run)
            for experts, unit, run in zip(found, layers, runs, strict=True)
        )
        return self.expert_groups

    def tile_mlps(self, tokens: int) -> None:
        """From the next `bind_outer` on the layers' MLPs run in tiles of so many tokens, not compiled; 0: whole."""
        if tokens and self.tiling is None:
            raise RuntimeError(f"layers of {self.spec.config.model_type} have no MLP that can run in tiles")
        self._tile_tokens = tokens
        if self.tiling is not None:
            set_tiles(self.tiling, tokens=tokens, unread=self._trial.unread_in_layers, layers=self._found.layers)

    def bind_sliced(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor], rows: Tensor) -> BoundSlices:
        """`bind_outer` without the embedding, for which `rows` [most rows, D] stands, and without the head's weight."""
        slicing = self.slicing
        if slicing is None:
            raise RuntimeError(f"the head of {self.spec.config.model_type} cannot be sliced")
        missing = {} if slicing.tied else {slicing.head.name: self._parts.outer[slicing.head.name]}
        bound = self.bind_outer(stem={**stem, slicing.embedding.name: rows}, tail={**tail, **missing})
        self._slices = BoundSlices(slicing, bound=bound, run=self._logits)
        self.sliced_head = self._slices.head(self.head)
        return self._slices

    def bind_outer(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make the given tensors (views of what stays on the device) the outer parameters and persistent buffers.

        Returns them by name, as they are bound.
        """
        self._unbind_slices()
        trainable = {e.name for unit in (self.anatomy.stem, self.anatomy.tail) for e in unit.layout.params}
        bound = {n: nn.Parameter(t) if n in trainable else t for n, t in (*stem.items(), *tail.items())}
        self._outer_sites.put(bound)
        self.stem_names = tuple(f"stem:{e.name}" for e in self.anatomy.stem.layout.params)
        self.stem_parameters = tuple(bound[e.name] for e in self.anatomy.stem.layout.params)
        owners = {e.name: "stem" for e in self.anatomy.stem.layout.params}
        owners |= {e.name: "tail" for e in self.anatomy.tail.layout.params}
        in_tail = [n for n in owners if n in self._trial.tail]
        self.head = Head(
            self._logits,
            self.spec.compile,
            tuple(f"{owners[n]}:{n}" for n in in_tail),
            tuple(bound[n] for n in in_tail),
        )
        compiled = self._compiled()
        self.layer_plans = tuple(
            LayerPlan(
                module,
                part.sites if groups is None else part.sites.only(e.name for e in groups.rest.entries),
                tuple(e.name for e in (unit.layout if groups is None else groups.rest).params),
                tuple(f"stem:{n}" for n in part.shared if n in trainable),
                tuple(bound[n] for n in part.shared if n in trainable),
                function,
            )
            for module, part, unit, function, groups in zip(
                self._found.layers, self._parts.layers, self.anatomy.layers, compiled, self.expert_groups, strict=True
            )
        )
        return bound

    def unbind_outer(self) -> None:
        """Forget the bound tensors, so that their memory can go; `bind_outer` may come again."""
        self._unbind_slices()
        self._outer_sites.clear()
        self.stem_parameters, self.layer_plans = (), ()
        self.head = Head(self._logits, self.spec.compile, (), ())

    def _unbind_slices(self) -> None:
        if self._slices is not None:
            self._slices.remove()
            self._slices = self.sliced_head = None

    @property
    def _eager(self) -> tuple[bool, ...]:
        """Per layer whether it is never compiled."""
        return tuple(bool(part.shared or self._trial.shared) for part in self._parts.layers)

    def _compiled(self) -> tuple[LayerFunction | None, ...]:
        """Layers that share parameters with others, hand on state, or stop at their experts, keep their own modules.

        So do all where MLPs run in tiles.
        """
        if not self.spec.compile or self._tile_tokens:
            return (None,) * len(self._found.layers)
        return compile_kinds(
            self._found.layers,
            kinds=self.anatomy.kinds,
            names=[part.sites.names for part in self._parts.layers],
            eager=[never or groups is not None for never, groups in zip(self._eager, self.expert_groups, strict=True)],
            tap=self._trial.tap,
        )

    def begin(self, batch: MicroBatch, *, grad: bool, documents: Documents | None = None) -> Pass:
        """Run the stem on `batch` (already where passes run). Without `grad` the pass is an evaluation: no dropout.

        documents: of `self.documents(batch)`, taken before the batch left the CPU. If it is missing and needed it
        is read back from the device, which waits for it.
        """
        self._set_training(grad and self.spec.training)
        if documents is None:
            documents = self.documents(batch)
        if documents is not None:
            documents = documents.to(batch.input_ids.device)
        with torch.set_grad_enabled(grad):
            calls = self._record_stem(batch)
        training = grad and self.spec.training
        kind = ExpertPass if any(self.expert_groups) else Pass
        return kind(self, batch=batch, calls=calls, shared=self._trial.shared, training=training, documents=documents)

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model as the integers that planning needs."""
        return model_sizes(
            self.spec,
            anatomy=self.anatomy,
            hidden_shape=self._trial.hidden_shape,
            saved_bytes_per_token=self._trial.saved_bytes_per_token,
            widest_bytes_per_token=self._trial.widest_bytes_per_token,
            attention_bytes_per_token=self._attention_bytes_per_token(),
            attention_layers=len(self._keepable),
            eager_layers=sum(self._eager),
            slicing=self.slicing,
            grouping=self.grouping if isinstance(self.grouping, Grouping) else None,
            tiling=self.tiling,
        )

    @cached_property
    def _keepable(self) -> dict[int, tuple[int, int]]:
        calls = self._trial.attention_calls if self.attention == VARLEN else ()
        return keepable(self._found.layers, calls=calls)

    @property
    def attention_layers(self) -> frozenset[int]:
        """Numbers of the layers whose attention can wait for the backward."""
        return frozenset(self._keepable)

    def _attention_bytes_per_token(self) -> int:
        itemsize = self.spec.precision.itemsize
        return max((heads * (size * itemsize + LSE_BYTES) for heads, size in self._keepable.values()), default=0)

    @property
    def aux_coefficient(self) -> float:
        """The weight of the router loss in the training loss; 0.0 if there is none."""
        return self._trial.router.coefficient if self._trial.router is not None else 0.0

    def aux_loss(self, passes: Sequence[Pass], *, grad: bool) -> Tensor | None:
        """The router loss (before its coefficient) once over all `passes`, whose forward is complete.

        None if the model has none, or the config has `output_router_logits` off. With `grad` the passes'
        backward will include its gradient.
        """
        if self._trial.router is None:
            return None
        return step_router_loss(self._trial.router, passes=passes, grad=grad)

    def enter(self, current: Pass) -> None:
        """Make `current` the pass that runs: dropout on or off, attention within its documents."""
        self._set_training(current.training)
        use_documents(current.documents)

    def run_layer(
        self,
        layer: int,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        exchange: Exchange | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Call the layer's module with `weights` bound. Returns hidden states and router logits."""
        plan, exchange = self.layer_plans[layer], exchange or Exchange()
        if plan.compiled is not None:
            ordered = tuple(weights[n] for n in plan.sites.names)
            out, logits, noted = plan.compiled(ordered, args, kwargs, exchange.noting, exchange.given)
            exchange.noted = noted
            return (out[0] if isinstance(out, tuple) else out), logits
        plan.sites.put(weights)
        exchange.noted = begin_exchange(noting=exchange.noting, given=exchange.given)
        try:
            out = plan.module(*args, **kwargs)
        finally:  # also where there was no memory: the run may be cut smaller, and nothing of this call may stay
            begin_exchange()
            plan.sites.clear()
            logits = self._trial.tap.take()
        return (out[0] if isinstance(out, tuple) else out), logits

    def _logits(self, hidden: Tensor) -> Tensor:
        shape = hidden.shape[-3:-1] if self._trial.full_length_tail else (1, 1)
        dummy = torch.zeros(shape, dtype=torch.int64, device=hidden.device)
        out = self._recorder.inject(hidden, run=lambda: self._model(input_ids=dummy, **self._trial.flags))
        logits: Tensor = out.logits
        return logits

    def _set_training(self, training: bool) -> None:
        if self._training is training:
            return
        self._training = training
        for root in (self._model, *self._found.layers):
            root.train(training)

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": batch.input_ids}
        if batch.attention_mask is not None and not batch.packed and self.attention != VARLEN:
            inputs["attention_mask"] = batch.attention_mask
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
            if self._explicit_masks:
                inputs["attention_mask"] = document_masks(
                    self._model.config, position_ids=batch.position_ids, dtype=self.spec.precision
                )
        return inputs


def _varlen_windows(spec: ModelSpec, *, rng: Rng) -> tuple[Window | None, ...] | None:
    """Per layer the window of its masks, read off a twin that has sdpa and a small window; None: not for varlen."""
    twin = replace(spec, config=trial_config(spec.config), attention="sdpa", training=False, compile=False)
    try:
        built = StreamedModel(Blueprint.of(twin, parts_of_units=False), rng=rng)
    except ModelError:
        return None
    built._outer_sites.put({n: striped(t) for n, t in built._parts.outer.items()})
    with torch.no_grad():
        calls = built._record(probe_row())
    return varlen_windows(calls, config=spec.config, position_ids=probe_positions())
