"""What a checkpoint says of itself: manifest.json, written last, so its presence means that the rest is there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatrain.files import read_own
from megatrain.train.state import TrainState
from megatrain.train.typed import misfit

FORMAT = 1
NAME = "manifest.json"


class Damaged(Exception):
    """A checkpoint that cannot be used, with the reason."""


@dataclass(frozen=True)
class FileInfo:
    """A file of the checkpoint as it was written."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class Identity:
    """What does not change during a run and must agree when it is resumed."""

    recipe: dict[str, Any]  # resolved
    plan: dict[str, Any]  # the memory plan, reused on resume
    precision: str  # "bf16" | "fp32"
    config_hash: str  # of the model's architecture
    data: str  # fingerprint of the prepared rows
    total_steps: int  # planned when it was written; may change on resume, and the schedule with it
    versions: dict[str, str]


@dataclass(frozen=True)
class Manifest:
    """Everything but the tensors, and the sizes and checksums of the files that hold those."""

    state: TrainState
    identity: Identity
    files: dict[str, FileInfo]  # by path relative to the checkpoint
    weights_sha256: str | None = None  # of all masters: equal in two runs whose weights are; None: an older version's

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def to_text(self) -> str:
        body = {
            "format": FORMAT,
            "step": self.state.step,
            "state": self.state.to_json(),
            "identity": asdict(self.identity),
            "weights_sha256": self.weights_sha256,
            "files": {name: asdict(info) for name, info in self.files.items()},
        }
        return json.dumps(body | {"checksum": _checksum(body)}, indent=1)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises Damaged on anything that `to_text` did not write."""
        try:
            body = json.loads(text)
            checksum = body.pop("checksum")
            if body.get("format") != FORMAT:
                raise Damaged(f"its format is {body.get('format')}, this version reads {FORMAT}")
            if checksum != _checksum(body):
                raise Damaged("the manifest does not match its own checksum")
            manifest = cls(
                state=TrainState.from_json(body["state"]),
                identity=Identity(**body["identity"]),
                files={name: FileInfo(**info) for name, info in body["files"].items()},
                weights_sha256=body.get("weights_sha256"),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"the manifest cannot be read ({str(error)[:200]})") from error
        fault = misfit(manifest)
        if fault is not None or manifest.identity.precision not in ("bf16", "fp32"):
            raise Damaged(f"the manifest holds what no run writes: {fault or 'its precision'}")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files all have the size that it says. Raises Damaged."""
    try:
        text = read_own(folder / NAME).decode()
    except FileNotFoundError:
        raise Damaged("it has no manifest: it was never completed") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"the manifest cannot be read ({error})") from error
    manifest = Manifest.from_text(text)
    for name, info in manifest.files.items():
        if Path(name).name != name or "\0" in name:
            raise Damaged(f"the manifest names a file outside the checkpoint: {name[:100]!r}")
        try:
            size = (folder / name).stat().st_size
        except (OSError, ValueError):  # ValueError: a null character
            raise Damaged(f"{name[:100]!r} is missing") from None
        if size != info.bytes:
            raise Damaged(f"{name} has {size} bytes, the manifest says {info.bytes}")
    return manifest


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
