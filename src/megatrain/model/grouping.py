"""Whether a model's experts can come in groups: tried out on a layer of each kind, without their weights.

With groups a layer runs up to its experts, then again with what they gave (experts_pass.py). In the backward nobody
has that sum any more, so no layer may keep what depends on it: adding and scaling are allowed, a norm behind the
experts is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatrain.model.anatomy_of import Parts
from megatrain.model.experts import Experts, NotGroupable, find_all
from megatrain.model.rehearsal import LONG, SHORT, Rehearsals, bytes_per_token
from megatrain.model.skeleton import LayerList
from megatrain.model.stubs import Recorder
from megatrain.model.trial import Trial, rehearsing_again


@dataclass(frozen=True)
class Grouping:
    """Which layers have experts that can come in groups."""

    layers: tuple[Experts | None, ...]
    rest_bytes_per_token: int  # what autograd keeps for the backward of the hungriest layer without its experts
    expert_bytes_per_token: int  # and for that of the experts alone, as if all came at once

    @property
    def count(self) -> int:
        """Experts of a layer that has some."""
        return next(one.count for one in self.layers if one is not None)


def find_grouping(
    *, found: LayerList, parts: Parts, recorder: Recorder, trial: Trial, kinds: Sequence[int]
) -> Grouping:
    """Stubs are in place, nothing is skipped in the layers yet; outer tensors are on the meta device before and after.

    Raises NotGroupable.
    """
    experts = find_all(found.layers, parts=parts.layers)
    if trial.shared:
        raise NotGroupable(f"its layers hand on {trial.shared[0]} beside the hidden states")
    if any(needs for one, needs in zip(experts, trial.forward_needs_grad, strict=True) if one is not None):
        raise NotGroupable("its attention bias has a gradient")
    try:
        with rehearsing_again(trial, parts=parts):
            rest, alone = _rehearse(experts, found=found, parts=parts, recorder=recorder, trial=trial, kinds=kinds)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        # Somebody else's code on arguments that it was not made for; nothing is lost but the groups.
        raise NotGroupable(f"a layer does not run without its experts: {error}") from error
    return Grouping(experts, rest, alone)


def _rehearse(
    experts: Sequence[Experts | None],
    *,
    found: LayerList,
    parts: Parts,
    recorder: Recorder,
    trial: Trial,
    kinds: Sequence[int],
) -> tuple[int, int]:
    """Bytes that autograd keeps of a token: of the hungriest layer without its experts, and of experts alone."""
    base: Any = partial(trial.base, **trial.flags)
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept: list[list[tuple[int, int]]] = []  # by length and layer: without experts, with them
    for length in (SHORT, LONG):
        rehearsals = Rehearsals.of_row(recorder, base, length=length, shared=trial.shared)
        kept.append([])
        for i in firsts:
            layer, part = found.layers[i], parts.layers[i]
            apart = rehearsals.run(i, layer=layer, parts=part, experts=experts[i])
            if apart.experts_read:
                raise NotGroupable("the backward of a layer reads what its experts gave")
            kept[-1].append((apart.saved_bytes, rehearsals.run(i, layer=layer, parts=part).saved_bytes))
    rest, whole = ([bytes_per_token(s[n], b[n]) for s, b in zip(*kept, strict=True)] for n in (0, 1))
    return max(rest), max(w - r for w, r in zip(whole, rest, strict=True))
