"""The slow half of structure.py: the model on the meta device (this imports torch and transformers)."""

from __future__ import annotations

import torch

from megatrain.model.attention import VARLEN
from megatrain.model.sizes_types import ModelFacts
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.recipe import Recipe
from megatrain.stream.device import CpuDevice
from megatrain.train.model_config import max_positions, read_config


def read_facts(recipe: Recipe, *, bf16: bool, ours: bool) -> ModelFacts:
    """ours: the variable-length attention that a run on a GPU takes, where the model is made for it."""
    config = read_config(recipe)
    model = StreamedModel.build(
        ModelSpec(
            config=config,
            attention=VARLEN if ours else recipe.model.attention,
            precision=torch.bfloat16 if bf16 else torch.float32,
            training=True,
            compile=False,  # sizes do not depend on it
            trust_remote_code=recipe.model.trust_remote_code,
        ),
        rng=CpuDevice().rng,
    )
    return facts_of(model)


def facts_of(model: StreamedModel) -> ModelFacts:
    """What planning needs to know of a model that was read."""
    config = model.spec.config
    return ModelFacts(
        sizes=model.sizes,
        model_type=str(config.model_type),
        stem_shared=model.anatomy.stem_shared,
        dense_masks=model.attention != VARLEN,
        attention=str(model.attention),
        max_positions=max_positions(config),
    )
