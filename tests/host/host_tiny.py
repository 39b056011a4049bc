"""Small models and their anatomy, made by hand: stem is the embedding, the layers are the layers, tail is the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megatrain.host.store import HostStore
from megatrain.host.weights import load_pretrained
from megatrain.model.anatomy import Anatomy, Unit
from megatrain.model.layout import FlatLayout, TensorSpec


def meta_model(config: PretrainedConfig, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model on the meta device, as the model room has it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def layer_list(model: nn.Module, config: PretrainedConfig) -> str:
    """Dotted path of the outermost module list with one module per layer."""
    count = config.get_text_config().num_hidden_layers
    return next(n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count)


def anatomy_of(model: Any, *, streamed: torch.dtype = torch.float32) -> Anatomy:
    """Every tensor of `model` in one unit; names a tensor shares are one entry."""
    path = layer_list(model, model.config)
    count = model.config.get_text_config().num_hidden_layers
    names: dict[int, list[str]] = {}
    specs: list[dict[str, tuple[TensorSpec, tuple[str, ...]]]] = [{} for _ in range(count + 2)]
    tensors = list(model.named_parameters(remove_duplicate=False))
    persistent = set(model.state_dict())
    buffers = [(n, b) for n, b in model.named_buffers() if n in persistent]
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    seen: set[int] = set()
    embedding = model.get_input_embeddings()
    for trainable, group in ((True, tensors), (False, buffers)):
        for name, tensor in group:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            head, _, rest = name.removeprefix(path + ".").partition(".")
            if name.startswith(path + "."):
                index, entry = int(head) + 1, rest
            else:
                index, entry = (0 if any(tensor is p for p in embedding.parameters()) else count + 1), name
            dtype = tensor.dtype if not trainable else (torch.float32 if streamed is torch.float32 else tensor.dtype)
            spec = TensorSpec(entry, tuple(tensor.shape), dtype, trainable)
            specs[index][entry] = (spec, tuple(names.get(id(tensor), [name])))
    labels = ["stem", *(f"layer {i}" for i in range(count)), "tail"]
    units = [
        Unit(
            i,
            label,
            FlatLayout.of(s for s, _ in specs[i].values()),
            {e: f for e, (_, f) in specs[i].items()},
            frozenset(),
        )
        for i, label in enumerate(labels)
    ]
    return Anatomy(units[0], tuple(units[1:-1]), units[-1], tuple(range(count)), True, False)


def saved(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of that config, saved to `folder` by transformers."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.parameters():  # every element its own, zeros and ones of norms too
        tensor.data += 0.01 * torch.randn_like(tensor)
    model.to(dtype).save_pretrained(folder)
    return model


def loaded(folder: Path, *, streamed: torch.dtype) -> tuple[HostStore, Any]:
    """The store and meta model of a saved folder."""
    config = AutoConfig.from_pretrained(folder)
    model = meta_model(config, dtype=streamed)
    store = HostStore.allocate(anatomy_of(model, streamed=streamed), pin=False, threads=1)
    load_pretrained(store, source=folder, meta_model=model, threads=2)
    return store, model


def state_of(store: HostStore) -> dict[str, torch.Tensor]:
    """Every parameter at full precision and every persistent buffer, by each of its names in the model."""
    return {
        name: unit.master(entry) if entry.trainable else unit.streamed(entry)
        for unit in store.units
        for entry in unit.unit.layout.entries
        for name in unit.unit.full_names[entry.name]
    }


def run_alone(script: str) -> list[str]:
    """Run a script in a process of its own with this one's import path. Returns the words that it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return done.stdout.split()
