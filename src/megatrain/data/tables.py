"""Reads csv, tsv, parquet, arrow, and data sets of the hub, without guessing a type from the first rows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatrain.data.lines import bounded_lines, open_bytes
from megatrain.data.records import Record
from megatrain.errors import DataError
from megatrain.model import hub

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_BATCH = 1024  # rows turned into Python values at a time
_ESCAPED = "surrogateescape"
_NAMED, _LONGEST_NAME = 5, 60  # columns in a message
_LONGEST_FIELD = 2**31 - 1
_LONGEST_REASON = 300  # characters of what a library says


def read_csv(path: Path, *, name: str, delimiter: str) -> Iterator[Record]:
    """Every field is text: a column of numbers that turns into words later is no fault here.

    Quoted fields may hold line feeds, so a record's line is where it ends.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    # Bytes are decoded in pieces of many lines: what is not UTF-8 is let through, and found in its line.
    with open_bytes(path) as data, io.TextIOWrapper(data, "utf-8-sig", errors=_ESCAPED, newline="") as file:
        reader = csv.reader(_utf_8_lines(file, name=name), delimiter=delimiter, strict=True)
        row = 0
        try:
            header = next(reader, None) or []
            _check_header(header, where=f"{name}:{reader.line_num}")
            for fields in reader:
                if not fields:
                    continue
                row += 1
                yield _csv_record(fields, header=header, name=name, row=row, line=reader.line_num)
        except csv.Error as error:
            raise DataError(f"broken CSV: {error}", where=f"{name}:{reader.line_num}") from error


def _utf_8_lines(file: TextIO, *, name: str) -> Iterator[str]:
    for number, line in enumerate(bounded_lines(file, name=name), start=1):
        try:
            line.encode("utf-8")
        except UnicodeEncodeError as error:
            byte = len(line[: error.start].encode("utf-8")) + 1
            hint = "write the file again as UTF-8"
            raise DataError(f"byte {byte} of the line is not UTF-8", where=f"{name}:{number}", hint=hint) from error
        yield line


def _check_header(header: list[str], *, where: str) -> None:
    """Columns without a name are nobody's; of two with one name the rows could hold only one."""
    twice = [column for column, count in Counter(header).items() if column and count > 1]
    if twice:
        names = ", ".join(repr(column[:_LONGEST_NAME]) for column in twice[:_NAMED])
        raise DataError(f"the header has {names} twice", where=where, hint="give each column a name of its own")


def _csv_record(fields: list[str], *, header: list[str], name: str, row: int, line: int) -> Record:
    if len(fields) != len(header):
        fault = f"has {len(fields)} fields, the header has {len(header)}"
        return Record(name, row, line, {}, fault=fault)
    return Record(name, row, line, dict(zip(header, fields, strict=True)))


def read_parquet(path: Path, *, name: str, wanted: frozenset[str]) -> Iterator[Record]:
    from pyarrow import parquet

    with _reading("parquet", name=name), parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        kept = [column for column in names if column in wanted]
        if not kept:
            yield from _unknown(names, rows=file.metadata.num_rows, name=name)
        else:
            yield from _rows(file.iter_batches(batch_size=_BATCH, columns=kept), name=name, wanted=wanted)


def read_arrow(path: Path, *, name: str, wanted: frozenset[str]) -> Iterator[Record]:
    """Both forms of Arrow files: the one with a footer, and the stream that `datasets` writes.

    The file is read, not mapped: an offset beyond the end of a mapping kills the process.
    """
    import pyarrow
    from pyarrow import ipc

    with _reading("arrow", name=name), pyarrow.OSFile(str(path)) as file:
        framed = file.read(6) == b"ARROW1"
        file.seek(0)
        if framed:
            reader = ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
            yield from _rows(batches, name=name, wanted=wanted)
        else:
            yield from _rows(iter(ipc.open_stream(file)), name=name, wanted=wanted)


def read_hub(path: str, *, subset: str | None, split: str, wanted: frozenset[str]) -> Iterator[Record]:
    """A data set of the hub (or of its cache) through `datasets`."""
    import datasets

    if not hub.reachable():
        datasets.config.HF_HUB_OFFLINE = True  # what was downloaded before can still be read
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
    """Only wanted columns become Python values: what nobody reads can neither cost nor fail.

    Offsets within a damaged batch may point anywhere in memory, so it is validated before it is looked at.
    """
    row = 0
    for batch in batches:
        kept = [column for column in batch.schema.names if column in wanted]
        if not kept:
            yield from _unknown(batch.schema.names, rows=batch.num_rows, name=name)
            continue
        chosen = batch.select(kept)
        chosen.validate(full=True)
        for start in range(0, batch.num_rows, _BATCH):
            for columns in chosen.slice(start, _BATCH).to_pylist():
                row += 1
                yield Record(name, row, None, columns)


def _unknown(names: list[str], *, rows: int, name: str) -> Iterator[Record]:
    """Rows of a table without one wanted column: their names alone, for the message."""
    columns = dict.fromkeys(names)
    return (Record(name, row, None, columns) for row in range(1, rows + 1))


@contextmanager
def _reading(kind: str, *, name: str) -> Iterator[None]:
    """pyarrow on a damaged file raises errors of many families, Python's own among them."""
    try:
        yield
    except Exception as error:
        raise DataError(f"cannot be read as {kind}: {_first_line(error)[:_LONGEST_REASON]}", where=name) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
