"""Reads jsonl and txt strictly: a record ends at a line feed and nowhere else.

``str.splitlines`` and readers built on it also break at U+2028, U+2029, U+0085 and friends, which are
ordinary characters inside a JSON string; a carriage return is white space before the line feed, and a byte
order mark is no part of the first key. Columns have no types here, so no later row can contradict an earlier one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, AnyStr, BinaryIO, cast

from megatrain.data.records import Record
from megatrain.errors import DataError
from megatrain.units import format_size

BEYOND_JSON = (RecursionError, ValueError)  # nested a thousand times; a number of more than 4,300 digits
BOM = b"\xef\xbb\xbf"
_LONGEST_LINE = 2**30
_PACKED = "unpack it, and give the path of what is in it"
_UTF_16 = "write it again as UTF-8, e.g. with iconv -f UTF-16 -t UTF-8"
_NO_TEXT = (
    (b"\x1f\x8b", "packed with gzip, which its name does not say", "let the name end in .gz, or unpack it"),
    (b"PK\x03\x04", "a zip archive (as .xlsx and .docx files are)", _PACKED),
    (b"\xfd7zXZ\0", "packed with xz", _PACKED),
    (b"\x28\xb5\x2f\xfd", "packed with zstd", _PACKED),
    (b"\xff\xfe", "UTF-16, not UTF-8", _UTF_16),
    (b"\xfe\xff", "UTF-16, not UTF-8", _UTF_16),
)
"""How files begin that are no text in UTF-8, what they are, and what to do about it."""


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file of text, unpacked if its name ends in .gz. What fails within is a DataError."""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            _check_text(bytes(file.peek(8)[:8]), where=str(path))
            yield cast(BinaryIO, file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot be read: {reason}", where=str(path)) from error


def _check_text(start: bytes, *, where: str) -> None:
    for beginning, what, hint in _NO_TEXT:
        if start.startswith(beginning):
            raise DataError(f"is {what}", where=where, hint=hint)
    if b"\0" in start[:2]:  # one half of an ASCII character
        raise DataError("is UTF-16, not UTF-8", where=where, hint=_UTF_16)


def bounded_lines(file: IO[AnyStr], *, name: str) -> Iterator[AnyStr]:
    """The lines of a file that is open. Raises DataError for one without end: a packed file of a few MB may hold it."""
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        if len(line) > _LONGEST_LINE:
            raise DataError(f"the line is longer than {format_size(_LONGEST_LINE)}", where=f"{name}:{number}")
        yield line


def read_jsonl(path: Path, *, name: str) -> Iterator[Record]:
    """One object per line. Blank lines are no records; a broken line is a record with its fault."""
    row = 0
    with open_bytes(path) as file:
        for line, data in enumerate(bounded_lines(file, name=name), start=1):
            body = (data.removeprefix(BOM) if line == 1 else data).strip(b" \t\r\n")
            if not body:
                continue
            row += 1
            yield _record(body, name=name, row=row, line=line)


def read_txt(path: Path, *, name: str) -> Iterator[Record]:
    """Every line is a text, as in `datasets`; blank lines are no records."""
    row = 0
    with open_bytes(path) as file:
        for line, data in enumerate(bounded_lines(file, name=name), start=1):
            body = (data.removeprefix(BOM) if line == 1 else data).rstrip(b"\r\n")
            if not body.strip():
                continue
            row += 1
            try:
                yield Record(name, row, line, {"text": body.decode("utf-8")})
            except UnicodeDecodeError as error:
                yield Record(name, row, line, {}, fault=f"byte {error.start + 1} of the line is not UTF-8")


def _record(body: bytes, *, name: str, row: int, line: int) -> Record:
    try:
        value = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(name, row, line, {}, fault=f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        return Record(name, row, line, {}, fault=f"broken JSON: {error.msg} at column {error.pos + 1}")
    except BEYOND_JSON as error:
        return Record(name, row, line, {}, fault=f"broken JSON: {reason_beyond(error)}")
    return as_record(value, name=name, row=row, line=line)


def as_record(value: object, *, name: str, row: int, line: int | None) -> Record:
    if not isinstance(value, dict):
        return Record(name, row, line, {}, fault=f"is {_kind(value)}, not an object with columns")
    return Record(name, row, line, value)


def reason_beyond(error: Exception) -> str:
    """What one of BEYOND_JSON means."""
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a string", bool: "a truth value"}.get(type(value), "a number")
