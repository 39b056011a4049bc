"""What one pass of the model reads: a micro-batch of token rows.

Letters: B rows, S positions (tokens per row, padding included).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORE = -100
"""The label of a token that is not supervised (the value Hugging Face and cross_entropy ignore)."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together, on the CPU until the executor moves them.

    ``labels[b, t]`` is ``input_ids[b, t]`` where token t is supervised (predicted from t-1) and
    ``IGNORE`` elsewhere: not shifted, as in Hugging Face. The first token of a document is never supervised.
    ``position_ids`` is given for packed rows only: it restarts at 0 with each document, and that is
    the one statement of where documents begin. Rows shorter than S are padded on the right;
    ``attention_mask`` (1 real, 0 padding) is given only then. In packed rows padding is a document of its own, and
    the mask only tells the router loss what not to count.
    """

    input_ids: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64
    position_ids: Tensor | None  # [B, S] int64
    attention_mask: Tensor | None  # [B, S] int64
    tokens: int  # real tokens, padding excluded
    supervised: int  # labels that are not IGNORE

    @property
    def packed(self) -> bool:
        return self.position_ids is not None
