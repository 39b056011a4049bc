"""A Hugging Face decoder without its weights: config, the module tree on the meta device, its list of layers.

Only non-persistent buffers (rotary frequencies and the like) are real: they are in no checkpoint, and
Hugging Face's own initialisation computes them from the config.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.errors import ModelError
from megatrain.model import hub
from megatrain.model.config_values import check_values, read_values
from megatrain.model.foreign import reason_of
from megatrain.units import format_size

REFUSED = {
    "dory": "its layers are called more than once per pass (looped)",
    "hrm_text": "its layers are called more than once per pass (looped)",
    "glm_moe_dsa": "a layer's top-k indices feed the next layer",
    "hy_v4": "a second layer output feeds the next layer",
    "rwkv": "the recurrent state of a layer feeds the next layer",
}
"""Model types that cannot run layer by layer, and why. The probes find them too; the names make the message plain."""

_MOST_COMPUTED = 4 << 30  # bytes of buffers that no checkpoint holds: tables of positions, masks


@dataclass(frozen=True)
class ModelSpec:
    """What to build. `attention` is a Hugging Face implementation name, or ``auto``."""

    config: PretrainedConfig
    attention: str
    precision: torch.dtype  # torch.bfloat16 or torch.float32: what is streamed
    training: bool  # dropout and router jitter are active in passes with gradients
    compile: bool
    trust_remote_code: bool = False


@dataclass(frozen=True)
class LayerList:
    """Where the decoder layers sit: `getattr(owner, attribute)` is the ModuleList called `prefix`."""

    owner: nn.Module
    attribute: str
    prefix: str
    layers: tuple[nn.Module, ...]


def load_config(path: str, *, revision: str, overrides: Mapping[str, Any], trust_remote_code: bool) -> PretrainedConfig:
    """The config of a hub id or a local folder, with `overrides` set on it.

    Raises ModelError when it cannot be read, holds values that no model has, names a key that the config does not
    have, or is no decoder-only language model. The hub is asked only for what is neither here nor in the cache.
    """
    path = _at_hand(path, revision=revision, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # its values meet the code of every model, or code that comes with it
        raise ModelError(
            f"cannot read the model's config.json: {reason_of(error)}",
            where=path,
            hint="model.path is a hub id or a folder that holds config.json",
        ) from error
    config = cast(PretrainedConfig, config)
    for key, value in overrides.items():
        _override(config, key, value)
    check_values(config.to_dict(), where="model.config" if overrides else path)
    refuse_by_type(config, trust_remote_code=trust_remote_code)
    return config


def _at_hand(path: str, *, revision: str, trust_remote_code: bool) -> str:
    """A folder with a config.json that may be acted on; or a hub id as it is, if the hub can be asked for it."""
    folder: Path | None = Path(path)
    if hub.is_hub_id(path):
        folder = hub.cached_folder(path, revision=revision, file="config.json")
        if folder is None and not hub.reachable():
            raise ModelError(
                f"{path} is neither a folder here nor in the cache, and the hub cannot be reached",
                where="model.path",
                hint="check the spelling and the network, or download the model and set model.path to its folder",
            )
    elif not Path(path).exists():
        hint = "model.path is a hub id or a folder that holds config.json"
        raise ModelError("there is no such folder, and it is no hub id", where=f"model.path ({path})", hint=hint)
    if folder is None or not (folder / "config.json").is_file():
        return path  # transformers fetches it, or says what is missing
    values = read_values(folder)
    own_code = values.get("auto_map")
    if own_code and values.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        raise ModelError(
            f"model type {str(values.get('model_type'))[:60]} comes with Python code (auto_map), which is not run",
            where=str(folder / "config.json"),
            hint="read that code; model.trust_remote_code: true runs it",
        )
    return path if trust_remote_code else str(folder)  # code is fetched by the hub id


def _override(config: Any, key: str, value: Any) -> None:
    """Set one key. The names that checkpoints use for rotary embeddings are one dictionary in transformers 5."""
    known = config.to_dict()
    if key == "rope_scaling" and not isinstance(value, Mapping | None):
        raise ModelError(f"must be a mapping, not {value!r}", where=f"model.config.{key}")
    if key in ("rope_scaling", "rope_theta") and isinstance(known.get("rope_parameters"), dict):
        fields = {"rope_theta": value} if key == "rope_theta" else {"rope_type": "default"} | (value or {})
        key, value = "rope_parameters", known["rope_parameters"] | fields
    if key not in known and key not in config.attribute_map:
        raise ModelError(f"the config of {config.model_type} has no key {key!r}", where=f"model.config.{key}")
    try:
        setattr(config, key, value)
    except Exception as error:  # transformers checks some types and raises classes of its own
        raise ModelError(f"cannot be {value!r}: {reason_of(error)}", where=f"model.config.{key}") from error


def refuse_by_type(config: PretrainedConfig, *, trust_remote_code: bool) -> None:
    """Raise ModelError for what is known from the config alone to be no decoder that runs layer by layer."""
    kind = str(config.model_type)
    if kind in REFUSED:
        raise ModelError(f"model type {kind} cannot be streamed layer by layer: {REFUSED[kind]}")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model type {kind} is an encoder-decoder; only decoder-only language models are supported")
    if "text_config" in config.sub_configs or "vision_config" in config.sub_configs:
        raise ModelError(
            f"model type {kind} is a composite (multimodal) model",
            hint="use the text model alone: a folder whose config.json is the text_config",
        )
    remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        raise ModelError(
            f"model type {kind} has no causal language model in transformers",
            hint="set model.trust_remote_code if the model brings its own code",
        )


def build_skeleton(spec: ModelSpec) -> nn.Module:
    """The model on the meta device, non-persistent buffers real on the CPU. The config is copied, not changed."""
    config = copy.deepcopy(spec.config)
    options: dict[str, Any] = {"dtype": spec.precision, "trust_remote_code": spec.trust_remote_code}
    if spec.attention != "auto":
        options["attn_implementation"] = spec.attention
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM  # its from_config has no types
            model = build.from_config(config, **options)
    except Exception as error:  # nothing is computed yet: whatever it is, it comes from these values
        raise ModelError(
            f"transformers cannot build {config.model_type}: {reason_of(error)}",
            hint="check the values in config.json and model.config, or try another model.attention",
        ) from error
    _fill_computed_buffers(model)
    return cast(nn.Module, model)


def _fill_computed_buffers(model: Any) -> None:
    """Let Hugging Face compute the buffers that no checkpoint holds, by its own from_pretrained path.

    Every weight is flagged as initialised, so that path touches only what is left: NaN in, values out.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = True
    computed: list[tuple[str, nn.Module, str]] = []
    total = 0
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                total += buffer.nbytes
                if total > _MOST_COMPUTED:
                    raise ModelError(
                        f"the computed buffer {path}.{name} {tuple(buffer.shape)} takes {format_size(buffer.nbytes)}",
                        hint="its size follows from config.json; check the numbers of positions in it",
                    )
                empty = float("nan") if buffer.is_floating_point() else 0
                module._buffers[name] = torch.empty_like(buffer, device="cpu").fill_(empty)
                computed.append((f"{path}.{name}", module, name))
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()
    for full, module, name in computed:
        buffer = module._buffers[name]
        if buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ModelError(f"the computed buffer {full} is not set by the model's initialisation")


def find_layers(model: nn.Module, *, count: int) -> LayerList:
    """The outermost ModuleList of `count` modules with the most parameters; of any length when none has `count`."""
    best = _largest_list(model, count=count) or _largest_list(model, count=None)
    if best is None:
        raise ModelError("the model has no list of decoder layers")
    path, found = best
    parent, _, attribute = path.rpartition(".")
    return LayerList(model.get_submodule(parent), attribute, path, tuple(found))


def _largest_list(model: nn.Module, *, count: int | None) -> tuple[str, nn.ModuleList] | None:
    best: tuple[int, str, nn.ModuleList] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0 or (count is not None and len(module) != count):
            continue
        if best is not None and path.startswith(best[1] + "."):
            continue
        size = sum(p.numel() for p in module.parameters())
        if best is None or size > best[0]:
            best = (size, path, module)
    return None if best is None else (best[1], best[2])
