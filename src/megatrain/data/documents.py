"""Reads JSON that is not line by line: lists, objects that span lines, and any of them one after another.

Everything up to the end of the file is either a row or refused: what is written behind a list (two files put
together, half of another one) is data that somebody meant to train on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatrain.data.lines import (
    BEYOND_JSON,
    BOM,
    as_record,
    bounded_lines,
    open_bytes,
    read_jsonl,
    reason_beyond,
)
from megatrain.data.records import Record
from megatrain.errors import DataError
from megatrain.units import format_size

_SPACE = re.compile(r"[ \t\r\n]*")  # of JSON
_PIECE = 2**24
_LARGEST_DOCUMENT = 2**33
"""Bytes of a file that is read whole; a packed file may hold more than its size."""


def read_json(path: Path, *, name: str) -> Iterator[Record]:
    """Lists of objects and objects, one after another: a list, one object, or jsonl under another name.

    An object whose only list is what the file holds, such as ``{"data": [...]}``, stands for that list.
    """
    with open_bytes(path) as file:
        start = file.read(4096).removeprefix(BOM).lstrip(b" \t\r\n")
    if not start.startswith(b"[") and _first_line_is_whole(path, name=name):
        yield from read_jsonl(path, name=name)
        return
    with open_bytes(path) as file:
        data = _whole(file, name=name).removeprefix(BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"byte {error.start} is not UTF-8", where=f"{name}:{line}") from error
    for row, item in enumerate(_items(_Scanner(text, name=name)), start=1):
        yield as_record(item.value, name=name, row=row, line=item.line)


def _first_line_is_whole(path: Path, *, name: str) -> bool:
    """Whether the first line that is not blank is a JSON value of its own, with others behind it."""
    with open_bytes(path) as file:
        lines = bounded_lines(file, name=name)
        first = next((line for line in lines if line.removeprefix(BOM).strip(b" \t\r\n")), b"")
        if not any(line.strip(b" \t\r\n") for line in lines):
            return False
    try:
        json.loads(first.removeprefix(BOM).decode("utf-8"))
    except (*BEYOND_JSON, UnicodeDecodeError):
        return False
    return True


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


@dataclass(frozen=True)
class _Item:
    value: object
    line: int  # in which it begins


class _Scanner:
    """Where in a text the next value begins. Raises DataError with the line and column of what is no JSON."""

    def __init__(self, text: str, *, name: str) -> None:
        self._text = text
        self._name = name
        self._decoder = json.JSONDecoder()
        self._position = 0
        self._line, self._counted = 1, 0  # of the latest value: lines are counted once
        self._skip(to=0)

    @property
    def ahead(self) -> str:
        """The character at the position, which is no white space; empty at the end."""
        return self._text[self._position : self._position + 1]

    def step(self) -> None:
        """Past a bracket or comma."""
        self._skip(to=self._position + 1)

    def value(self) -> _Item:
        """The value that begins here; the position is then behind it."""
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        try:
            value, end = self._decoder.raw_decode(self._text, self._position)
        except json.JSONDecodeError as error:
            raise self._broken(error.msg, position=error.pos) from error
        except BEYOND_JSON as error:
            raise self.broken(reason_beyond(error)) from error
        self._skip(to=end)
        return _Item(value, self._line)

    def broken(self, message: str) -> DataError:
        """What to raise for something at the position."""
        return self._broken(message, position=self._position)

    def _broken(self, message: str, *, position: int) -> DataError:
        line = self._text.count("\n", 0, position) + 1
        column = position - (self._text.rfind("\n", 0, position) + 1) + 1
        return DataError(f"broken JSON: {message} at column {column}", where=f"{self._name}:{line}")

    def _skip(self, *, to: int) -> None:
        match = _SPACE.match(self._text, to)
        self._position = match.end() if match else to


def _items(scanner: _Scanner) -> Iterator[_Item]:
    """Every value of the document, those of its lists one by one."""
    first = True
    while scanner.ahead:
        if scanner.ahead == "[":
            yield from _list_items(scanner)
        elif first or scanner.ahead == "{":
            item = scanner.value()
            inner = _only_list(item.value) if first and not scanner.ahead else None
            yield from [item] if inner is None else (_Item(value, item.line) for value in inner)
        else:
            raise scanner.broken("neither a list nor an object follows the end of the one before")
        first = False


def _list_items(scanner: _Scanner) -> Iterator[_Item]:
    scanner.step()
    while scanner.ahead != "]":
        if not scanner.ahead:
            raise scanner.broken("the list is not closed")
        yield scanner.value()
        if scanner.ahead == ",":
            scanner.step()
        elif scanner.ahead != "]":
            raise scanner.broken("expected ',' or ']'")
    scanner.step()


def _only_list(value: object) -> list[object] | None:
    lists = [item for item in value.values() if isinstance(item, list)] if isinstance(value, dict) else []
    if len(lists) != 1 or not lists[0] or not isinstance(lists[0][0], dict):
        return None
    is_row = {"messages", "conversations", "conversation"} & set(value) or {"role", "from"} & set(lists[0][0])  # type: ignore[call-overload]
    return None if is_row else lists[0]
