"""What the tests of this room share."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.errors import MegatrainError
from megatrain.recipe import load_recipe

MINIMAL = """\
model:
  path: m
data:
  train: a.jsonl
  max_seq_len: 8
output:
  dir: runs/x
"""


def refusal(path: str, **options: Any) -> MegatrainError:
    with pytest.raises(MegatrainError) as caught:
        load_recipe(path, **options)
    return caught.value
