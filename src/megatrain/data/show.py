"""A sample as a person reads it: its text, cut where labels begin and end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megatrain.data.samples import Sample


@dataclass(frozen=True)
class Stretch:
    """Text that is trained on, or is not."""

    text: str
    supervised: bool
    tokens: int


def stretches(sample: Sample, *, tokenizer: PreTrainedTokenizerBase) -> list[Stretch]:
    """The text of a sample; joined, it is what the tokens decode to (but for characters cut by a border)."""
    tokens = sample.tokens.tolist()
    found = []
    end, before = 0, ""
    for supervised, group in itertools.groupby(sample.supervised.tolist()):
        count = len(list(group))
        end += count
        # Decoded from the beginning each time: some tokenizers drop a space at the start of what they decode.
        text = tokenizer.decode(tokens[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        found.append(Stretch(text[len(before) :], supervised, count))
        before = text
    return found
