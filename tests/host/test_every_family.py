"""Every family that streams: its checkpoint in, the same checkpoint out, by the real anatomy of the model room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from families.variants import VARIANTS, config_of
from host.host_tiny import saved, state_of
from megatrain.errors import ModelError
from megatrain.host.export import export_model
from megatrain.host.initial import init_random
from megatrain.host.store import HostStore
from megatrain.host.weights import load_pretrained
from megatrain.model.skeleton import ModelSpec
from megatrain.model.streamed import StreamedModel

UNSET = {"apertus": "alpha_p"}
"""Parameters that the family's `_init_weights` forgets: it cannot start from random weights."""
QUICK = ("gpt2", "zamba2", "dbrx")


class NoRng:
    def get(self) -> object:
        return None

    def set(self, state: Any) -> None:
        return None


def test_the_list_is_complete() -> None:
    assert len(VARIANTS) >= 90
    assert set(QUICK) <= set(VARIANTS)


@pytest.mark.parametrize("variant", [pytest.param(v, marks=() if v in QUICK else pytest.mark.slow) for v in VARIANTS])
def test_a_checkpoint_goes_in_and_comes_out(variant: str, tmp_path: Path) -> None:
    saved(config_of(variant), tmp_path / "source")
    spec = ModelSpec(config_of(variant), "eager", torch.bfloat16, training=True, compile=False)
    built = StreamedModel.build(spec, rng=NoRng())
    store = HostStore.allocate(built.anatomy, pin=False, threads=1)
    load_pretrained(store, source=tmp_path / "source", meta_model=built.meta_model, threads=2)

    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).state_dict()
    state = state_of(store)
    assert set(state) == set(expected)
    assert [n for n, t in expected.items() if not torch.equal(state[n], t.to(state[n].dtype))] == []

    before = load_file(tmp_path / "source" / "model.safetensors")
    buffers = {n for u in store.units for e in u.unit.layout.buffers for n in u.unit.full_names[e.name]}
    for source in (tmp_path / "source", None):
        folder = tmp_path / f"out-{source is None}"
        export_model(store, folder, meta_model=built.meta_model, source=source, dtype="fp32")
        after = load_file(folder / "model.safetensors")
        assert set(after) == set(before)
        if source is None:  # buffers in the dtype that transformers gives them in a bf16 model
            for name in buffers & set(before):
                before[name] = before[name].to(after[name].dtype)
                expected[name] = before[name].to(expected[name].dtype)
        assert [n for n, t in before.items() if not torch.equal(after[n], t)] == []
        reloaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        assert not any(info.values())
        assert [n for n, t in reloaded.state_dict().items() if not torch.equal(t, expected[n])] == []

    if variant in UNSET:
        with pytest.raises(ModelError, match=f"{UNSET[variant]} unset"):
            init_random(store, meta_model=built.meta_model, seed=0)
        return
    init_random(store, meta_model=built.meta_model, seed=0)
    drawn = state_of(store)
    assert all(bool(t.isfinite().all()) for t in drawn.values())
    assert any(not torch.equal(drawn[n], state[n]) for n in drawn)
    assert not any(bool(unit.exp_avg.any()) for unit in store.units)
