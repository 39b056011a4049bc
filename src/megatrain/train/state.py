"""Where a run stands between two steps: everything that a resume needs beside the tensors."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class TrainState:
    """After `step` steps. (`epoch`, `index`) is the place of the next step's data in the loader's order."""

    step: int = 0
    epoch: int = 0
    index: int = 0  # steps of this epoch that are used up
    epoch_share: float = 0.0  # the same as a share of the epoch, for reports
    tokens: int = 0
    supervised_tokens: int = 0
    skipped_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    first_eval_loss: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None  # the step after which eval_loss was measured

    @property
    def epochs(self) -> float:
        """Epochs of data used up."""
        return self.epoch + self.epoch_share

    def advanced(self, *, steps_in_epoch: int) -> Self:
        """One step later in the data: the step counts, its data is used up."""
        index = self.index + 1
        if index < steps_in_epoch:
            return dataclasses.replace(self, step=self.step + 1, index=index, epoch_share=index / steps_in_epoch)
        return dataclasses.replace(self, step=self.step + 1, epoch=self.epoch + 1, index=0, epoch_share=0.0)

    def counted(self, *, tokens: int, supervised_tokens: int, loss: float | None) -> Self:
        """With a step's tokens added. loss: None for a step that was skipped."""
        state = dataclasses.replace(
            self, tokens=self.tokens + tokens, supervised_tokens=self.supervised_tokens + supervised_tokens
        )
        if loss is None:
            return dataclasses.replace(state, skipped_steps=self.skipped_steps + 1)
        first = loss if self.first_loss is None else self.first_loss
        return dataclasses.replace(state, first_loss=first, last_loss=loss)

    def evaluated(self, loss: float) -> Self:
        first = loss if self.first_eval_loss is None else self.first_eval_loss
        return dataclasses.replace(self, first_eval_loss=first, eval_loss=loss, eval_step=self.step)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises TypeError when fields are unknown or missing."""
        return cls(**data)


def step_seed(seed: int, *, step: int) -> int:
    """What dropout of one step draws from: a function of the recipe's seed and the step; nothing is carried along."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:8], "little") >> 1
