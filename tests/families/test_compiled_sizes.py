"""What the plan of compiled layers is made of, read off layers that were never run."""

from __future__ import annotations

import pytest
import torch
from variants import attention_of, config_of

from megatrain.model.sizes_types import ModelSizes
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel
from megatrain.stream.device import CpuDevice


def sizes_of(variant: str) -> ModelSizes:
    spec = ModelSpec(config_of(variant), attention_of(variant), torch.bfloat16, True, False)
    return StreamedModel.build(spec, rng=CpuDevice().rng).sizes


@pytest.mark.parametrize(
    ("variant", "width"), [("llama", 96), ("mixtral", 2 * 96), ("gpt2", 4 * 64), ("falcon", 4 * 64)]
)
def test_the_widest_product_is_found_however_it_is_written(variant: str, width: int) -> None:
    assert sizes_of(variant).widest_bytes_per_token == 2 * width


@pytest.mark.parametrize(("variant", "eager"), [("llama", 0), ("gemma3n_text", 4), ("zamba2", 2)])
def test_layers_that_are_never_compiled_are_counted(variant: str, eager: int) -> None:
    assert sizes_of(variant).eager_layers == eager
