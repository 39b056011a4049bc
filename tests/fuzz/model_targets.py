"""safetensors files, their index, and config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from fuzz.mutations import as_json, broken, mutated
from fuzz.target import Target
from megatrain.host.source import locate
from megatrain.host.tensor_file import opened, read_header, read_into
from megatrain.model.skeleton import ModelSpec, load_config
from megatrain.model.streamed import StreamedModel
from megatrain.recipe import resolve_asset

_TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.zeros(0, 4),
    "c": torch.tensor(2),
    "d": torch.ones(5).bfloat16(),
}
_FILE = save(_TENSORS, metadata={"format": "pt"})
_LENGTH = int.from_bytes(_FILE[:8], "little")
_HEADER = json.loads(_FILE[8 : 8 + _LENGTH])
_BODY = _FILE[8 + _LENGTH :]


def read_safetensors(data: bytes, folder: Path) -> None:
    """Every tensor of an accepted file lies inside it and can be read."""
    path = folder / "model.safetensors"
    path.write_bytes(data)
    file = read_header(path)
    with opened([path]) as fds:
        for tensor in file.tensors:
            assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)
            block = torch.empty(tensor.nbytes, dtype=torch.uint8)
            read_into(block, fd=fds[path], offset=tensor.offset)
            assert block.numpy().tobytes() == data[tensor.offset : tensor.offset + tensor.nbytes]


def read_index(data: bytes, folder: Path) -> None:
    """Every file of an accepted index lies beside it."""
    save_file({"a": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(data)
    for tensor in locate(folder).tensors.values():
        assert tensor.path.parent == folder


class _NoRng:
    def get(self) -> object:
        return None

    def set(self, state: Any) -> None:
        pass


def read_config(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    config = load_config(str(folder), revision="main", overrides={}, trust_remote_code=False)
    spec = ModelSpec(config, "auto", torch.float32, training=True, compile=False)
    StreamedModel.build(spec, rng=_NoRng())


def _file(header: Any) -> bytes:
    text = as_json(header)
    return len(text).to_bytes(8, "little") + text + _BODY


_CONFIG = json.loads((resolve_asset("megatrain:kjv-tiny") / "config.json").read_text())
_LLAMA = _CONFIG | {"num_hidden_layers": 2}
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "attn_pdrop": 0.1,
}
_MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_jitter_noise": 0.0,
    "sliding_window": 4,
}
_QWEN3 = _LLAMA | {
    "model_type": "qwen3",
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
}
_CONFIGS = [_LLAMA, _GPT2, _MIXTRAL, _QWEN3]
_INDEX = {"metadata": {"total_size": 16}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}

MODELS = (
    Target("safetensors", read_safetensors, mutated(_HEADER).map(_file) | broken([_FILE])),
    Target("index", read_index, mutated(_INDEX).map(as_json) | broken([as_json(_INDEX)])),
    Target("config", read_config, st.sampled_from(_CONFIGS).flatmap(mutated).map(as_json) | broken([as_json(_LLAMA)])),
)
