"""Reads json, jsonl and txt strictly: a record ends at a line feed and nowhere else.

``str.splitlines`` and readers built on it also break at U+2028, U+2029, U+0085 and friends, which are
ordinary characters inside a JSON string; a carriage return is white space before the line feed, and a byte
order mark is no part of the first key. Columns have no types here, so no later row can contradict an earlier one.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, AnyStr, BinaryIO, cast

from megatrain.data.records import Record
from megatrain.errors import DataError
from megatrain.units import format_size

_SPACE = re.compile(r"[ \t\r\n]*")  # of JSON
_BEYOND_JSON = (RecursionError, ValueError)  # nested a thousand times; a number of more than 4,300 digits
_BOM = b"\xef\xbb\xbf"
_LONGEST_LINE = 2**30
_PIECE = 2**24
_LARGEST_DOCUMENT = 2**33
"""Bytes of a .json file that is not line by line, which is read whole; a packed file may hold more than its size."""


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if its name ends in .gz. What fails within, now or later, is a DataError."""
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot be read: {reason}", where=str(path)) from error


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
            body = (data.removeprefix(_BOM) if line == 1 else data).strip(b" \t\r\n")
            if not body:
                continue
            row += 1
            yield _record(body, name=name, row=row, line=line)


def read_json(path: Path, *, name: str) -> Iterator[Record]:
    """A list of objects, objects one after another (jsonl under another name), or one object.

    An object whose only list is what it holds, such as ``{"data": [...]}``, stands for that list.
    """
    with open_bytes(path) as file:
        start = file.read(4096).removeprefix(_BOM).lstrip(b" \t\r\n")
    if not start.startswith(b"[") and _first_line_is_whole(path, name=name):
        yield from read_jsonl(path, name=name)
        return
    with open_bytes(path) as file:
        data = _whole(file, name=name).removeprefix(_BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"byte {error.start} is not UTF-8", where=f"{name}:{line}") from error
    yield from _scan(text, name=name)


def _whole(file: BinaryIO, *, name: str) -> bytes:
    """All of a file, in pieces: asked for more than there is, a file takes the memory for it first."""
    pieces, size = [], 0
    while piece := file.read(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > _LARGEST_DOCUMENT:
            hint = "write one object per line and call it .jsonl"
            raise DataError(f"one JSON document of more than {format_size(_LARGEST_DOCUMENT)}", where=name, hint=hint)
    return b"".join(pieces)


def read_txt(path: Path, *, name: str) -> Iterator[Record]:
    """Every line is a text, as in `datasets`; blank lines are no records."""
    row = 0
    with open_bytes(path) as file:
        for line, data in enumerate(bounded_lines(file, name=name), start=1):
            body = (data.removeprefix(_BOM) if line == 1 else data).rstrip(b"\r\n")
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
    except _BEYOND_JSON as error:
        return Record(name, row, line, {}, fault=f"broken JSON: {_reason(error)}")
    return as_record(value, name=name, row=row, line=line)


def as_record(value: object, *, name: str, row: int, line: int | None) -> Record:
    if not isinstance(value, dict):
        return Record(name, row, line, {}, fault=f"is {_kind(value)}, not an object with columns")
    return Record(name, row, line, value)


def _first_line_is_whole(path: Path, *, name: str) -> bool:
    """Whether the first line that is not blank is a JSON value of its own, with others behind it."""
    with open_bytes(path) as file:
        lines = bounded_lines(file, name=name)
        first = next((line for line in lines if line.removeprefix(_BOM).strip(b" \t\r\n")), b"")
        if not any(line.strip(b" \t\r\n") for line in lines):
            return False
    try:
        json.loads(first.removeprefix(_BOM).decode("utf-8"))
    except (*_BEYOND_JSON, UnicodeDecodeError):
        return False
    return True


def _scan(text: str, *, name: str) -> Iterator[Record]:
    """Values of a document that is not line by line, each with the line it begins in."""
    decoder = json.JSONDecoder()
    in_list = text.lstrip(" \t\r\n").startswith("[")
    position, line, counted, row = _skip(text, 0), 1, 0, 0
    if in_list:
        position = _skip(text, position + 1)
    while position < len(text) and not (in_list and text[position] == "]"):
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _broken(error.msg, text=text, position=error.pos, name=name) from error
        except _BEYOND_JSON as error:
            raise _broken(_reason(error), text=text, position=position, name=name) from error
        inner = _only_list(value) if not in_list and row == 0 and _skip(text, end) == len(text) else None
        for item in [value] if inner is None else inner:
            row += 1
            yield as_record(item, name=name, row=row, line=line)
        position = _skip(text, end)
        if in_list:
            if position < len(text) and text[position] == ",":
                position = _skip(text, position + 1)
            elif text[position : position + 1] != "]":
                raise _broken("expected ',' or ']'", text=text, position=position, name=name)
    if in_list and position >= len(text):
        raise _broken("the list is not closed", text=text, position=len(text), name=name)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _only_list(value: object) -> list[object] | None:
    lists = [item for item in value.values() if isinstance(item, list)] if isinstance(value, dict) else []
    if len(lists) != 1 or not lists[0] or not isinstance(lists[0][0], dict):
        return None
    is_row = {"messages", "conversations", "conversation"} & set(value) or {"role", "from"} & set(lists[0][0])  # type: ignore[call-overload]
    return None if is_row else lists[0]


def _broken(message: str, *, text: str, position: int, name: str) -> DataError:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return DataError(f"broken JSON: {message} at column {column}", where=f"{name}:{line}")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "a list", str: "a string", bool: "a truth value"}.get(type(value), "a number")
