"""A checkpoint's manifest, forged with a checksum that is right, up to the decision where a run starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from data.data_kit import recipe
from fuzz.mutations import as_json, broken, mutated
from fuzz.target import Target
from megatrain.plan.accounting import MemoryPlan
from megatrain.plan.hardware import Limit
from megatrain.recipe import Recipe
from megatrain.train import manifest
from megatrain.train.manifest import Identity, Manifest
from megatrain.train.resume import check_same_run, decide
from megatrain.train.rundir import RunDir
from megatrain.train.state import TrainState


def _recipe() -> Recipe:
    return recipe("a.jsonl", sections={"output": {"dir": "x"}})


def _whole() -> dict[str, Any]:
    counts = {field.name: 1 for field in dataclasses.fields(MemoryPlan)}
    tables = {"host": {}, "device": {}, "host_limit": Limit(1, "x"), "device_limit": None}
    plan = MemoryPlan(**counts | tables | {"on_cpu": True, "activations": "device"})
    identity = Identity(_recipe().to_dict(), plan.to_dict(), "fp32", "hash", "data", 10, {"python": "3"})
    return json.loads(Manifest(TrainState(step=1, index=1, first_loss=2.0), identity, {}).to_text())


def forged(data: bytes) -> bytes:
    """`data` with the checksum that it should have, if it is a manifest at all."""
    try:
        body = json.loads(data)
        if isinstance(body, dict) and "checksum" in body:
            del body["checksum"]
            return json.dumps(body | {"checksum": manifest._checksum(body)}).encode()
    except (ValueError, RecursionError):
        pass
    return data


def read_manifest(data: bytes, folder: Path) -> None:
    path = folder / "checkpoints" / "step-000001"
    path.mkdir(parents=True)
    (path / manifest.NAME).write_bytes(forged(data))
    for resume in ("auto", str(path)):
        start = decide(RunDir(folder), resume=resume, recipe=_recipe())
        for checkpoint in start.candidates:
            identity = checkpoint.manifest.identity
            check_same_run(identity, now=identity)
            checkpoint.manifest.to_text()
            assert checkpoint.state.epochs >= 0
            assert checkpoint.manifest.total_bytes >= 0


_MANIFEST = _whole()
CHECKPOINTS = (
    Target("manifest", read_manifest, mutated(_MANIFEST).map(as_json) | broken([json.dumps(_MANIFEST).encode()])),
)
