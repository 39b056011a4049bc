"""What a file yields: records with an address, and reasons why one cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

_KEPT = 1000  # addresses kept of each kind; the counts are exact beyond it
_LONGEST_REASON = 500  # characters; what a row says of itself may be as long as the row


class Cause(Enum):
    """What has to change for a refused row to be used."""

    FILE = "the file, which is damaged or not what its name says"
    COLUMNS = "the columns, which nothing is known by"
    VALUES = "what stands in the columns"


class BadRow(Exception):
    """This row cannot be used, and the text says why. Never leaves the data room."""

    def __init__(self, text: str, *, cause: Cause = Cause.VALUES) -> None:
        super().__init__(text)
        self.cause = cause


def json_of(text: str | bytes, *, what: str) -> object:
    """The value of a JSON text. Raises BadRow, also for what Python's reader gives up on."""
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise BadRow(f"{what} is not UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise BadRow(f"{what} is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise BadRow(f"{what} is nested too deeply") from error
    except ValueError as error:
        raise BadRow(f"{what} has a number of too many digits") from error


@dataclass(frozen=True)
class Record:
    """One row of a file, as it was read."""

    file: str  # as the user would name it
    row: int  # 1-based among the records of the file
    line: int | None  # 1-based; None where the format has no lines
    columns: Mapping[str, object]
    fault: str | None = None  # why it could not be read; columns is empty then

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}: row {self.row}" if self.line is not None else f"{self.file}: row {self.row}"


@dataclass(frozen=True)
class Refusal:
    """A row that was left out, with its address and the reason."""

    file: str
    row: int
    line: int | None
    reason: str

    @classmethod
    def of(cls, record: Record, *, reason: str) -> Refusal:
        short = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
        return cls(record.file, record.row, record.line, short)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        return f"{place}: row {self.row}: {self.reason}"


@dataclass
class Tally:
    """How many rows something happened to, and where the first of them are."""

    count: int = 0
    first: list[Refusal] = field(default_factory=list)
    causes: Counter[Cause] = field(default_factory=Counter)

    def add(self, refusal: Refusal, *, cause: Cause = Cause.VALUES) -> None:
        self.count += 1
        self.causes[cause] += 1
        if len(self.first) < _KEPT:
            self.first.append(refusal)
