"""The fused loss of bf16 logits: eager definition and compiled kernel against PyTorch's cross-entropy in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.model.batch import IGNORE
from megatrain.model.tail import compiled_loss_and_slope, fused_loss_and_slope

Fused = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_loss_and_slope_are_those_of_cross_entropy(compiled: bool, rows: int) -> None:
    function: Fused = compiled_loss_and_slope() if compiled else fused_loss_and_slope
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, 1000, generator=generator) * 8).to(torch.bfloat16)
    targets = torch.randint(0, 1000, (rows,), generator=generator)
    targets[::3] = IGNORE
    denominator = 50
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, targets, ignore_index=IGNORE, reduction="sum") / denominator
    (slope,) = torch.autograd.grad(expected, leaf)
    share = (targets != IGNORE).float().unsqueeze(-1) / denominator
    each, found = function(logits, targets.clamp_min(0).unsqueeze(-1), share)
    assert found.dtype is torch.bfloat16
    assert float(each.double().sum()) == pytest.approx(float(expected.detach()), rel=1e-6)
    # rounded to bf16 once, at the end: half an ulp is 2^-9 of the value
    assert torch.all((found.double() - slope).abs() <= slope.abs() * 2**-8 + 1e-9)
    assert not found[targets == IGNORE].any()
