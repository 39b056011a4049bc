"""The parts of a decoder as units that move: stem, layers, tail.

The *stem* is everything outside the layers that a pass needs before or beside them: embeddings, and any
tensor shared by two layers or by the embedding and the head (ties). The *tail* is what only the output
needs: final norm, untied head. Every trainable tensor belongs to exactly one unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.model.layout import FlatLayout


@dataclass(frozen=True)
class Unit:
    """What moves together. `index` is its place in the store: stem 0, layer i at i + 1, tail last."""

    index: int
    name: str  # "stem", "layer 3", "tail"
    layout: FlatLayout
    full_names: dict[str, tuple[str, ...]]  # entry name -> every name the tensor has in the model, canonical first
    unused: frozenset[str]  # parameters that never get a gradient (no weight decay either, as in torch)


@dataclass(frozen=True)
class Anatomy:
    """Which unit every tensor of the model belongs to."""

    stem: Unit
    layers: tuple[Unit, ...]
    tail: Unit
    kinds: tuple[int, ...]  # per layer: layers of one kind run the same code on the same layout
    stem_in_tail: bool  # the tail reads stem tensors (tied head)
    stem_in_layers: bool  # layers read stem tensors (shared across layers)

    @property
    def stem_shared(self) -> bool:
        """Whether others read stem tensors too: its gradient sum then lives beside theirs, from the loss on."""
        return self.stem_in_tail or self.stem_in_layers

    @property
    def units(self) -> tuple[Unit, ...]:
        """In store order, which is also the order of the optimizer: what the next forward needs first."""
        return (self.stem, *self.layers, self.tail)
