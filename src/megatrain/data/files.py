"""From what a recipe calls a source (file, glob, folder, hub id, ``megatrain:NAME``) to the files it means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatrain.data.documents import read_json
from megatrain.data.folders import files_in, has_magic, matching
from megatrain.data.lines import read_jsonl, read_txt
from megatrain.data.records import Record
from megatrain.data.tables import read_arrow, read_csv, read_hub, read_parquet
from megatrain.errors import DataError
from megatrain.recipe import is_asset, resolve_asset

KINDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_PACKED = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt")  # may also end in .gz
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")


@dataclass(frozen=True)
class Place:
    """Where the rows of a source are."""

    files: tuple[Path, ...]  # empty: a data set of the hub
    hub_id: str | None = None
    name: str | None = None  # what to call the one file, if not by its path
    left_out: tuple[Path, ...] = ()  # of a folder: files whose names announce no split, where those of others do


def locate(path: str, *, split: str = "train", subset: str | None = None) -> Place:
    """The files of a source, in a fixed order. Raises DataError.

    `split` chooses among the files of a folder (by the words in their names, as on the hub) and among the
    splits of a hub data set; what is in a file is split "train".
    """
    try:
        place = _find(path, split=split)
    except OSError as error:  # no permission to look, a name that is too long, a loop of links
        raise DataError(f"cannot be looked at: {error.strerror}", where=path) from error
    if place.hub_id is None and subset is not None:
        raise DataError(f"only data sets of the hub have subsets ({subset!r})", where=path)
    if place.hub_id is None and split != "train" and not Path(path).expanduser().is_dir():
        raise DataError(f"a file has no split {split!r}", where=path, hint="give the file of that split as the path")
    return place


def _find(path: str, *, split: str) -> Place:
    if is_asset(path):
        return Place((_known(resolve_asset(path)),), name=path)
    local = Path(path).expanduser()
    if local.is_dir():
        return _of_folder(local, split=split)
    if local.is_file():
        return Place((_known(local),))
    if has_magic(path):
        found = matching(str(local))
        if not found:
            raise DataError("no file matches", where=path, hint="relative paths count from the current directory")
        return Place(tuple(_known(p) for p in found))
    in_a_folder = local.parent != Path() and local.parent.is_dir()
    if _suffix(local) in KINDS or in_a_folder or not _HUB_ID.match(path):
        hint = "relative paths count from the current directory"
        raise DataError("no such file or folder", where=path, hint=hint)
    return Place((), hub_id=path)


def read(place: Place, *, subset: str | None, split: str, wanted: frozenset[str]) -> Iterator[Record]:
    """Every record of a source, file after file. Tables are read for the `wanted` columns only."""
    if place.hub_id is not None:
        yield from read_hub(place.hub_id, subset=subset, split=split, wanted=wanted)
    for path in place.files:
        yield from _read_file(path, name=place.name or str(path), wanted=wanted)


def _read_file(path: Path, *, name: str, wanted: frozenset[str]) -> Iterator[Record]:
    match _suffix(path):
        case ".jsonl" | ".ndjson":
            return read_jsonl(path, name=name)
        case ".json":
            return read_json(path, name=name)
        case ".csv":
            return read_csv(path, name=name, delimiter=",")
        case ".tsv":
            return read_csv(path, name=name, delimiter="\t")
        case ".parquet":
            return read_parquet(path, name=name, wanted=wanted)
        case ".arrow":
            return read_arrow(path, name=name, wanted=wanted)
        case _:
            return read_txt(path, name=name)


def _suffix(path: Path) -> str:
    if path.suffix.lower() == ".gz":
        inner = Path(path.stem).suffix.lower()
        return inner if inner in _PACKED else ".gz"
    return path.suffix.lower()


def _known(path: Path) -> Path:
    if _suffix(path) not in KINDS:
        raise DataError(
            f"a file of this kind is not understood: {path.suffix or 'no suffix'}",
            where=str(path),
            hint=f"data files end in {', '.join(KINDS)}",
        )
    return path


def _of_folder(folder: Path, *, split: str) -> Place:
    saved = folder / "dataset_dict.json"  # datasets.DatasetDict.save_to_disk
    if saved.is_file():
        names = [str(name) for name in _list_in(saved, key="splits")]
        if split not in names or "/" in split or split == "..":
            raise _no_split(folder, split=split, names=names)
        folder = folder / split
    state = folder / "state.json"  # datasets.Dataset.save_to_disk; says the order of its files
    if state.is_file():
        return Place(_listed(state))
    if saved.is_file():
        split = "train"
    found = sorted(p for p in files_in(folder) if _is_data(p, folder=folder))
    if not found:
        raise DataError("the folder holds no data files", where=str(folder), hint=f"expected {', '.join(KINDS)}")
    by_split: dict[str, list[Path]] = {}
    for path in found:
        by_split.setdefault(_split_of(path.relative_to(folder)) or "", []).append(path)
    if set(by_split) == {""}:
        if split != "train":
            raise _no_split(folder, split=split, names=["train"])
        return Place(tuple(found))
    wanted = next((name for name, words in _SPLIT_WORDS.items() if split in words), split)
    if wanted not in by_split:
        raise _no_split(folder, split=split, names=sorted(filter(None, by_split)))
    return Place(tuple(by_split[wanted]), left_out=tuple(by_split.get("", ())))


def _listed(state: Path) -> tuple[Path, ...]:
    """The files that a saved data set consists of, which lie beside its state.json."""
    names = [item.get("filename") for item in _list_in(state, key="_data_files") if isinstance(item, dict)]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            hint = "a saved data set holds all of its files; save it again, or give the path of its files"
            raise DataError(f"names {str(name)[:100]!r}, which is no file beside it", where=str(state), hint=hint)
        if not (state.parent / name).is_file():
            raise DataError(f"names {name[:100]!r}, which is not there", where=str(state))
    return tuple(state.parent / str(name) for name in names)


def _list_in(file: Path, *, key: str) -> list[object]:
    """What `datasets` wrote of its own. Raises DataError where it did not."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))[key])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        hint = "load the data set with `datasets` and save it again, or give the path of its files"
        raise DataError(f"is not what `datasets` writes (no list {key!r})", where=str(file), hint=hint) from error


def _is_data(path: Path, *, folder: Path) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    return not hidden and _suffix(path) in KINDS and path.name != "dataset_info.json"


def _split_of(path: Path) -> str | None:
    """The split that a file's name (or a folder's on the way to it) announces."""
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for name, synonyms in _SPLIT_WORDS.items():
            if any(word in synonyms for word in words):
                return name
    return None


def _no_split(folder: Path, *, split: str, names: list[str]) -> DataError:
    return DataError(f"the folder has no split {split!r}", where=str(folder), hint=f"it has: {', '.join(names)}")
