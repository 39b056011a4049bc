"""A Hugging Face decoder whose layers' weights come as arguments: the model as the executor sees it.

The stem (embeddings, masks, rotary tables) and the tail (final norm, head) run as Hugging Face wrote them,
with stubs in the layers' places; each layer is its own Hugging Face module with a slot's views bound to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.errors import ModelError
from megatrain.model.attention import VARLEN, Documents, keepable, use_documents
from megatrain.model.attention_fit import fitting_blueprint, leaking
from megatrain.model.aux import step_router_loss
from megatrain.model.batch import MicroBatch
from megatrain.model.blueprint import Blueprint
from megatrain.model.compiled import compile_experts
from megatrain.model.experts import ExpertGroups, NotGroupable
from megatrain.model.experts_pass import ExpertPass
from megatrain.model.grouping import Grouping
from megatrain.model.kept_attention import LSE_BYTES
from megatrain.model.layer_plan import LayerPlan, never_compiled, plan_layers
from megatrain.model.outer import OuterModel
from megatrain.model.passes import Pass
from megatrain.model.rows_and_slices import BoundSlices
from megatrain.model.sizes import model_sizes
from megatrain.model.sizes_types import ModelSizes
from megatrain.model.skeleton import ModelSpec, build_skeleton, refuse_by_type
from megatrain.model.tail import Head
from megatrain.model.tiles import set_tiles


class Rng(Protocol):
    """The default generator of the device that layers run on."""

    def get(self) -> object: ...

    def set(self, state: Any) -> None: ...


class StreamedModel:
    """Built once per run; `begin` starts a pass of one micro-batch."""

    def __init__(self, blueprint: Blueprint, *, rng: Rng) -> None:
        self.spec, self.anatomy, self.rng = blueprint.spec, blueprint.anatomy, rng
        self.slicing, self.grouping, self.tiling = blueprint.slicing, blueprint.grouping, blueprint.tiling
        self._blueprint, self._found, self._trial = blueprint, blueprint.found, blueprint.trial
        self.outer = OuterModel(blueprint)
        self.expert_groups: tuple[ExpertGroups | None, ...] = (None,) * len(self.anatomy.layers)
        self._tile_tokens = 0
        self.stochastic = self.spec.training and self._trial.stochastic
        self.forward_needs_grad = self._trial.forward_needs_grad
        self.layer_plans: tuple[LayerPlan, ...] = ()  # while outer tensors are bound

    @classmethod
    def build(cls, spec: ModelSpec, *, rng: Rng) -> StreamedModel:
        """Read the model's structure on the meta device. Raises ModelError for what cannot run exactly.

        Attention ``megatrain_varlen`` falls back to Hugging Face's default where the family is not made for it.
        """
        refuse_by_type(spec.config, trust_remote_code=spec.trust_remote_code)
        return cls(fitting_blueprint(spec), rng=rng)

    @property
    def attention(self) -> str:
        """The attention in use: the spec's, or what it fell back to."""
        return self.outer.attention

    @property
    def head(self) -> Head:
        """What is behind the layers as a function; its parameters are there while outer tensors are bound."""
        return self.outer.head

    @cached_property
    def meta_model(self) -> nn.Module:
        """The whole model on the meta device, layers in place: for names, ties, config, initialisation, saving."""
        return build_skeleton(self.spec)

    def check_packing(self) -> None:
        """Make sure that documents packed into a row stay apart. Call it before the first packed batch.

        Raises ModelError naming the layers where they would not. Families that need explicit masks get them.
        """
        without = leaking(self.spec, kinds=self.anatomy.kinds, explicit_masks=False)
        if not without:
            return
        if not leaking(self.spec, kinds=self.anatomy.kinds, explicit_masks=True):
            self.outer.explicit_masks = True
            return
        index = without[0]
        kind = self.anatomy.kinds[index]
        same = [i for i, k in enumerate(self.anatomy.kinds) if k == kind]
        raise ModelError(
            f"{type(self._found.layers[index]).__name__} (layers {', '.join(map(str, same))}) lets packed documents "
            f"see each other in model type {self.spec.config.model_type}",
            hint="set data.packing: false",
        )

    def documents(self, batch: MicroBatch) -> Documents | None:
        """What `begin` needs to know of a batch before it leaves the CPU; None if the attention does not ask."""
        return self.outer.documents(batch)

    def outer_buffers_to(self, device: torch.device) -> None:
        """Move the computed buffers (rotary tables, scales) to where passes run. Persistent ones come by binding."""
        self.outer.buffers_to(device)

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
        slices = self.outer.bind_sliced(stem=stem, tail=tail, rows=rows)
        self._plan_layers()
        return slices

    def bind_outer(self, *, stem: Mapping[str, Tensor], tail: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Make the given tensors (views of what stays on the device) the outer parameters and persistent buffers.

        Returns them by name, as they are bound.
        """
        self.outer.bind(stem=stem, tail=tail)
        self._plan_layers()
        return self.outer.bound

    def unbind_outer(self) -> None:
        """Forget the bound tensors, so that their memory can go; `bind_outer` may come again."""
        self.outer.unbind()
        self.layer_plans = ()

    def _plan_layers(self) -> None:
        self.layer_plans = plan_layers(
            self._blueprint, bound=self.outer.bound, groups=self.expert_groups, tiled=self._tile_tokens > 0
        )

    def begin(self, batch: MicroBatch, *, grad: bool, documents: Documents | None = None) -> Pass:
        """Run the stem on `batch` (already where passes run). Without `grad` the pass is an evaluation: no dropout.

        documents: of `self.documents(batch)`, taken before the batch left the CPU. If it is missing and needed it
        is read back from the device, which waits for it.
        """
        training = grad and self.spec.training
        self.outer.set_training(training)
        if documents is None:
            documents = self.documents(batch)
        if documents is not None:
            documents = documents.to(batch.input_ids.device)
        with torch.set_grad_enabled(grad):
            calls = self.outer.record(batch)
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
            eager_layers=sum(never_compiled(self._blueprint)),
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
        self.outer.set_training(current.training)
        use_documents(current.documents)
