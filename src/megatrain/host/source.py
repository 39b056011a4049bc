"""Where a pretrained model's weights are: a folder, or a hub id that becomes one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from megatrain.errors import ModelError
from megatrain.host.tensor_file import StoredTensor, read_header
from megatrain.model import hub

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "*.py")
_HTTP_CLIENT: Any = HfHubHTTPError.__mro__[1]  # HTTPError of whichever client this huggingface_hub uses
_NETWORK: tuple[type[Exception], ...] = (OSError, HFValidationError, _HTTP_CLIENT)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """All tensors of a checkpoint by name, and the file each is in."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(t.path for t in self.tensors.values()))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def fetch(path: str, *, revision: str = "main") -> Path:
    """The folder of a model: `path` itself, or the hub repository of that id, from the local cache if it is there.

    Raises ModelError when there is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(path) or path.startswith("."):
        raise ModelError(
            f"{path} is not a folder and not a hub id", hint="model.path: a folder with config.json, or ORG/NAME"
        )
    try:
        cached = Path(snapshot_download(path, revision=revision, allow_patterns=list(HUB_FILES), local_files_only=True))
        if has_weights(cached):
            locate(cached)  # a half-downloaded one is completed below
            return cached
    except (OSError, HFValidationError, ModelError):
        pass  # not, or not all, in the cache
    if not hub.reachable():
        raise ModelError(
            f"{path} is neither a folder here nor whole in the cache, and the hub cannot be reached",
            where="model.path",
            hint="check the spelling and the network, or download the model and set model.path to its folder",
        )
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise ModelError(f"{path} is gated on the hub", hint="accept its licence there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{path} has no revision {revision} on the hub", hint="check model.revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no folder and no hub model {path}", hint="check model.path") from error
    except _NETWORK as error:
        raise ModelError(
            f"{path} is not a folder here, and the hub could not be reached: {error}",
            hint="download the model to a folder and set model.path to it",
        ) from error


def has_weights(folder: Path) -> bool:
    """Whether the folder has safetensors weights (a folder with only a config is enough for model.init: random)."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def locate(folder: Path) -> Source:
    """Read the headers of a folder's safetensors files, single or sharded. Raises ModelError."""
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
        wanted: dict[str, str] = {}
    elif (folder / INDEX).is_file():
        wanted = _weight_map(folder / INDEX)
        files = [folder / name for name in sorted(set(wanted.values()))]
    else:
        raise _no_safetensors(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        if not path.is_file():
            raise ModelError(f"the index names {path.name}, which is not there", where=str(folder / INDEX))
        for tensor in read_header(path).tensors:
            if tensor.name in tensors:
                first = tensors[tensor.name].path.name
                raise ModelError(f"{tensor.name} is in {first} too", where=str(path))
            tensors[tensor.name] = tensor
    for name, file in wanted.items():
        if name not in tensors or tensors[name].path.name != file:
            raise ModelError(f"the index says that {name} is in {file}; it is not", where=str(folder / INDEX))
    return Source(folder, tensors)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
        weight_map = content["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError("not an index of safetensors files (no weight_map)", where=str(index)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("weight_map is not a mapping of tensor names to files", where=str(index))
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ModelError(
                f"{name}: {file!r} is not the name of a safetensors file beside the index", where=str(index)
            )
    return weight_map


def _no_safetensors(folder: Path) -> ModelError:
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        return ModelError(
            f"has its weights in {pickled[0]}, which can run code when loaded; only safetensors are read",
            where=str(folder),
            hint="convert once: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
        )
    other = sorted(p.name for p in folder.glob("*.safetensors"))
    found = f" (there is {other[0]}, without an index)" if other else ""
    return ModelError(
        f"has neither {SINGLE} nor {INDEX}{found}",
        where=str(folder),
        hint="model.path needs a complete download; model.init: random needs only config.json",
    )
