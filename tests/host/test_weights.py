from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from host.families import FAMILIES
from host.host_tiny import loaded, saved, state_of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("streamed", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_are_what_transformers_loads(family: str, streamed: torch.dtype, tmp_path: Path) -> None:
    saved(FAMILIES[family](), tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    store, _ = loaded(tmp_path, streamed=streamed)
    state = state_of(store)
    assert set(state) == set(expected)
    different = [n for n, t in expected.items() if not torch.equal(state[n], t.to(state[n].dtype))]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_source_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    saved(FAMILIES["qwen3_moe"](), tmp_path, dtype=dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for streamed in (torch.float32, torch.bfloat16):
        state = state_of(loaded(tmp_path, streamed=streamed)[0])
        assert [n for n, t in expected.items() if not torch.equal(state[n], t)] == []
