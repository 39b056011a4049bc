"""Sizes of models that were read before, found again without torch: by config, settings and versions.

Reading a model's structure takes seconds, most of it imports. What it yields depends on config.json, the overrides,
precision and attention, and on the code that reads it: so those are the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatrain.model.sizes_types import ExpertSizes, ModelFacts, ModelSizes, SliceSizes, TileSizes, UnitSizes
from megatrain.model.user_cache import keep, read_kept


@dataclass(frozen=True)
class SizesKey:
    """What the sizes of a model depend on. config: config.json as it stands."""

    config: Mapping[str, Any]
    overrides: Mapping[str, Any]
    precision: str
    attention: str

    @property
    def name(self) -> str:
        """Of the file that holds them."""
        parts = {**asdict(self), "code": _code()}
        text = json.dumps(parts, sort_keys=True, default=str)
        return f"sizes/{hashlib.sha256(text.encode()).hexdigest()}.json"


def find_facts(key: SizesKey) -> ModelFacts | None:
    """What was kept for this key; None if nothing was, or it is damaged."""
    found = read_kept(key.name)
    if found is None:
        return None
    try:
        sizes = found["sizes"]
        layers = tuple(_unit(values) for values in sizes["layers"])
        ends = {"stem": _unit(sizes["stem"]), "tail": _unit(sizes["tail"])}
        slicing = None if sizes["slicing"] is None else SliceSizes(**sizes["slicing"])
        experts = None if sizes["experts"] is None else _experts(sizes["experts"])
        tiling = None if sizes["tiling"] is None else TileSizes(**sizes["tiling"])
        parts = {"layers": layers, "slicing": slicing, "experts": experts, "tiling": tiling}
        known = ModelSizes(**{**sizes, **ends, **parts})
        facts = ModelFacts(**{**found, "sizes": known})
    except (KeyError, TypeError):
        return None
    return facts if _whole(facts) else None


def keep_facts(key: SizesKey, facts: ModelFacts) -> None:
    """For the next time; a cache that cannot be written is none."""
    keep(key.name, asdict(facts))


def _unit(values: Any) -> UnitSizes:
    return UnitSizes(**values)


def _experts(values: Any) -> ExpertSizes:
    lists = {key: tuple(values[key]) for key in ("elems", "itemsizes")}
    return ExpertSizes(**{**values, **lists, "rest": tuple(_unit(unit) for unit in values["rest"])})


def _whole(facts: ModelFacts) -> bool:
    """Whether every number is one: JSON of the right shape may hold anything."""
    sizes = facts.sizes
    experts = sizes.experts
    units = (sizes.stem, *sizes.layers, sizes.tail, *(experts.rest if experts else ()))
    numbers = [v for u in units for k, v in asdict(u).items() if k != "name"]
    others = ("stem", "layers", "tail", "config_hash", "slicing", "experts", "tiling", "rest", "elems", "itemsizes")
    numbers += [v for k, v in asdict(sizes).items() if k not in others]
    for part in (sizes.slicing, sizes.tiling):
        numbers += [] if part is None else asdict(part).values()
    if experts:
        numbers += [*(v for k, v in asdict(experts).items() if k not in others), *experts.elems, *experts.itemsizes]
        if len(experts.rest) != len(sizes.layers) or not len(experts.elems) == len(experts.itemsizes) > 0:
            return False
    return bool(sizes.layers) and all(type(n) is int and n >= 0 for n in numbers)


@cache
def _code() -> str:
    """Versions of the libraries, and the sources of this room: what is read depends on both."""
    found = [f"{package} {_version(package)}" for package in ("megatrain", "torch", "transformers")]
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
