"""How a model is computed on a device, where the recipe leaves it open: its precision, its attention, compiled or not.

No torch here: `estimate-memory` asks for machines that are only described.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.recipe import Recipe

Capability = tuple[int, int]
"""CUDA's compute capability: what instructions a GPU has."""

AMPERE: Capability = (8, 0)
"""The first with bf16 in its tensor cores, and the least that flash attention's kernels ask for."""
VOLTA: Capability = (7, 0)
"""The least that PyTorch's compiler makes kernels for."""


@dataclass(frozen=True)
class Ways:
    """Of one run on one device."""

    modern: bool  # a GPU with bf16
    bf16: bool  # else fp32
    ours: bool  # our variable-length attention, where the model is made for it; else what the recipe says
    compiled: bool

    @classmethod
    def of(cls, recipe: Recipe, *, on_cuda: bool, capability: Capability | None = None) -> Ways:
        """capability: None counts as a GPU that can all of it."""
        modern = on_cuda and (capability is None or capability >= AMPERE)
        bf16 = recipe.train.precision == "bf16" or (recipe.train.precision == "auto" and modern)
        return cls(
            modern=modern,
            bf16=bf16,
            ours=recipe.model.attention == "auto" and bf16 and modern,
            compiled=on_cuda and recipe.memory.compile == "auto" and (capability is None or capability >= VOLTA),
        )


def words_for_old(*, name: str, capability: Capability | None) -> str | None:
    """What a GPU from before bf16 means for runs; None for others."""
    if capability is None or capability >= AMPERE:
        return None
    number = ".".join(map(str, capability))
    return (
        f"{name} has compute capability {number}, and bf16 begins with 8.0: unless train.precision says bf16 (which it "
        "emulates, slowly) it computes in fp32, with PyTorch's attention, and weights take twice the bytes"
    )
