"""Reads csv, tsv, parquet, arrow, and data sets of the hub, without guessing a type from the first rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.data.lines import open_bytes
from megatrain.data.records import Record
from megatrain.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_BATCH = 1024  # rows turned into Python values at a time
_LONGEST_FIELD = 2**31 - 1


def read_csv(path: Path, *, name: str, delimiter: str) -> Iterator[Record]:
    """Every field is text: a column of numbers that turns into words later is no fault here.

    Quoted fields may hold line feeds, so a record's line is where it ends.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    with open_bytes(path) as data, io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        row = 0
        try:
            header = next(reader, None)
            for fields in reader:
                if not fields:
                    continue
                row += 1
                yield _csv_record(fields, header=header or [], name=name, row=row, line=reader.line_num)
        except csv.Error as error:
            raise DataError(f"broken CSV: {error}", where=f"{name}:{reader.line_num}") from error
        except UnicodeDecodeError as error:
            raise DataError("is not UTF-8", where=f"{name}:{reader.line_num + 1}") from error


def _csv_record(fields: list[str], *, header: list[str], name: str, row: int, line: int) -> Record:
    if len(fields) != len(header):
        fault = f"has {len(fields)} fields, the header has {len(header)}"
        return Record(name, row, line, {}, fault=fault)
    return Record(name, row, line, dict(zip(header, fields, strict=True)))


def read_parquet(path: Path, *, name: str, wanted: frozenset[str]) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            kept = [column for column in names if column in wanted]
            if not kept:
                yield from _unknown(names, rows=file.metadata.num_rows, name=name)
            else:
                yield from _rows(file.iter_batches(batch_size=_BATCH, columns=kept), name=name, wanted=wanted)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as parquet: {error}", where=name) from error


def read_arrow(path: Path, *, name: str, wanted: frozenset[str]) -> Iterator[Record]:
    """Both forms of Arrow files: the one with a footer, and the stream that `datasets` writes."""
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as file:
            framed = file.read(6) == b"ARROW1"
            file.seek(0)
            if framed:
                reader = ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
                yield from _rows(batches, name=name, wanted=wanted)
            else:
                yield from _rows(iter(ipc.open_stream(file)), name=name, wanted=wanted)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as arrow: {error}", where=name) from error


def read_hub(path: str, *, subset: str | None, split: str, wanted: frozenset[str]) -> Iterator[Record]:
    """A data set of the hub (or of its cache) through `datasets`."""
    import datasets

    try:
        found = datasets.load_dataset(path, name=subset, split=split)
    except (OSError, ValueError, RuntimeError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the data set cannot be had: {_first_line(error)}",
            where=path,
            hint="no file or folder has this name, so it was looked up on the hub: check the spelling, data.train's "
            "subset and split, and the network; a local copy is given as a path to its files",
        ) from error
    batches = (batch for table in found.with_format("arrow").iter(_BATCH) for batch in table.to_batches())
    yield from _rows(batches, name=path, wanted=wanted)


def _rows(batches: Iterator[RecordBatch], *, name: str, wanted: frozenset[str]) -> Iterator[Record]:
    """Only wanted columns become Python values: what nobody reads can neither cost nor fail."""
    row = 0
    for batch in batches:
        kept = [column for column in batch.schema.names if column in wanted]
        if not kept:
            yield from _unknown(batch.schema.names, rows=batch.num_rows, name=name)
        for start in range(0, batch.num_rows if kept else 0, _BATCH):
            for columns in batch.select(kept).slice(start, _BATCH).to_pylist():
                row += 1
                yield Record(name, row, None, columns)


def _unknown(names: list[str], *, rows: int, name: str) -> Iterator[Record]:
    """Rows of a table without one wanted column: their names alone, for the message."""
    columns = dict.fromkeys(names)
    return (Record(name, row, None, columns) for row in range(1, rows + 1))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
