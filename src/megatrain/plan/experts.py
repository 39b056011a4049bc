"""Experts in groups (stream/experts.py), in bytes.

Letters: T tokens of a step, D their width, K experts that a token chooses, E experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.model.sizes_types import ExpertSizes, ModelSizes, UnitSizes

GROUP_PLACES = 2
"""`stream.schedule.GROUP_PLACES`: one group is used while the next arrives."""
ALIGN_ELEMS = 128
"""`model.layout.ALIGN_ELEMS`."""
FEWEST = 2
"""`model.experts.FEWEST`: experts of a group."""


@dataclass(frozen=True)
class GroupedExperts:
    """What takes the place of whole layers on the device."""

    sizes: ModelSizes
    known: ExpertSizes
    groups: int

    @property
    def layers(self) -> tuple[UnitSizes, ...]:
        """Without their experts."""
        return self.known.rest

    @property
    def count(self) -> int:
        """Groups there are: `model.experts.spans_of`."""
        return max(1, min(self.groups, self.known.count // FEWEST))

    @property
    def height(self) -> int:
        """Experts of the largest group; others may have one fewer."""
        return -(-self.known.count // self.count)

    @property
    def group_elems(self) -> int:
        return sum(self._elems())

    @property
    def group_bytes(self) -> int:
        """Of a group as it is streamed, and of its gradient as it goes home."""
        return sum(self._bytes())

    @property
    def largest_bytes(self) -> int:
        """Of the largest tensor of a group."""
        return max(self._bytes())

    def _bytes(self) -> list[int]:
        return [n * size for n, size in zip(self._elems(), self.known.itemsizes, strict=True)]

    def _elems(self) -> list[int]:
        """Of a group, by parameter, alignment included."""
        return [-(-self.height * n // ALIGN_ELEMS) * ALIGN_ELEMS for n in self.known.elems]

    @property
    def places(self) -> int:
        return GROUP_PLACES * self.group_bytes

    def waiting_bytes(self, *, step_tokens: int, tokens: int) -> int:
        """What all micro-batches hold of a layer while its groups pass, at most: backwards, what the experts are called
        with (hidden states, choices, their weights), the gradient of what they give, and fp32 gradients of the former;
        and what our own attention gave, so that it does not run again.

        The plan counts two copies of the step's hidden states. In the backward one of them is free, and counts for the
        gradient of what experts give, but for the micro-batch, of so many `tokens`, that the layer runs with.
        """
        width, hidden = self.sizes.hidden_numel_per_token, self.sizes.hidden_bytes_per_token
        each = hidden + 4 * width + (8 + 4 + 4) * self.known.chosen + self.sizes.attention_bytes_per_token
        return step_tokens * each + tokens * hidden

    @property
    def divided(self) -> int:
        return layers_with_experts(self.sizes, known=self.known)


def layers_with_experts(sizes: ModelSizes, *, known: ExpertSizes) -> int:
    return sum(whole.elems > rest.elems for whole, rest in zip(sizes.layers, known.rest, strict=True))


def active_params(sizes: ModelSizes, *, known: ExpertSizes) -> int:
    """Of experts, those that a token multiplies with, in all layers."""
    return layers_with_experts(sizes, known=known) * known.chosen * sum(known.elems)
