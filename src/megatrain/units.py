"""Quantities a person writes with a unit: sizes in bytes, and intervals in steps, epochs or time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_SIZE = re.compile(r"(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_SIZE_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")

_DURATION = re.compile(r"(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)")
_COUNTED: dict[str, Literal["steps", "epochs"]] = {
    "": "steps",
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
}
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}


def parse_size(size: str | int) -> int:
    """Bytes of ``"24GiB"`` (powers of 1024), ``"24 GB"`` (powers of 1000) or a plain number of bytes.

    Raises ValueError with a message for the person who wrote it.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise ValueError(f"{_quoted(size)} is not a size: write it like 24GiB, 24 GB, or in bytes")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a size cannot be negative: {_quoted(size)}")
        if size >= 2**63:
            raise ValueError(f"{_quoted(size)} is more than any memory")
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"{_quoted(size)} is not a size: write it like 24GiB, 24 GB, or in bytes")
    number, unit = match[1].replace("_", ""), match[2].lower()
    if unit in {"k", "m", "g", "t", "p", "ki", "mi", "gi", "ti", "pi"}:
        letter = unit[0].upper()
        raise ValueError(f"{_quoted(size)}: write {letter}iB (powers of 1024) or {letter}B (powers of 1000)")
    if unit not in _SIZE_UNITS:
        raise ValueError(f"{_quoted(size)} is not a size: unknown unit `{match[2]}` (GiB, GB, MiB, MB, ...)")
    if len(number) > 20:
        raise ValueError(f"{_quoted(size)} is more than any memory")
    if number.isdigit():
        return int(number) * _SIZE_UNITS[unit]
    return round(float(number) * _SIZE_UNITS[unit])


def parse_rate(rate: str) -> int:
    """Bytes per second of ``"25GB/s"`` or ``"25 GB"``. Raises ValueError with a message for the person who wrote it."""
    found = parse_size(rate.strip().removesuffix("/s").rstrip())
    if found == 0:
        raise ValueError("a rate of 0 moves nothing")
    return found


def _quoted(value: object) -> str:
    text = str(value)
    return f"`{text[:37]}...`" if len(text) > 40 else f"`{text}`"


def format_size(size: int, *, decimals: int = 1) -> str:
    """For people: ``23.4 GiB``. Not exact; see `exact_size`."""
    if abs(size) < 1024:
        return f"{size} bytes"
    value, power = float(size), 0
    while abs(value) >= 1024 and power < len(_BINARY) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.{decimals}f} {_BINARY[power]}"


def exact_size(size: int) -> str | int:
    """The shortest form that `parse_size` reads back to the same number: ``24GiB``, ``24GB``, or bytes."""
    forms = [str(size)]
    for power, letter in enumerate("KMGTP", start=1):
        for base, infix in ((1024, "i"), (1000, "")):
            if size and size % base**power == 0:
                forms.append(f"{size // base**power}{letter}{infix}B")
    shortest = min(forms, key=len)
    return size if shortest == forms[0] else shortest


@dataclass(frozen=True)
class Duration:
    """So many steps, epochs or seconds."""

    value: int | float
    unit: Literal["steps", "epochs", "seconds"]

    @classmethod
    def parse(cls, text: str | int) -> Duration:
        """``500`` and ``"500 steps"``, ``"1 epoch"``, ``"30 min"``, ``"1.5 h"``. Raises ValueError."""
        if isinstance(text, bool) or not isinstance(text, (str, int)):
            raise ValueError(f'{_quoted(text)} is not an interval: write a number of steps, "1 epoch", or "30 min"')
        match = _DURATION.fullmatch(str(text).strip())
        if match is None:
            raise ValueError(f'{_quoted(text)} is not an interval: write a number of steps, "1 epoch", or "30 min"')
        number, unit = float(match[1].replace("_", "")), match[2].lower()
        if number > 1e15:
            raise ValueError(f"{_quoted(text)} is never reached; null turns it off")
        if number <= 0:
            raise ValueError(f"an interval must be positive, not {_quoted(text)}; null turns it off")
        if unit in _COUNTED:
            if number != int(number):
                raise ValueError(f"{_quoted(text)}: only whole {_COUNTED[unit]} can be counted")
            return cls(int(number), _COUNTED[unit])
        if unit in _SECONDS:
            seconds = number * _SECONDS[unit]
            return cls(int(seconds) if seconds == int(seconds) else seconds, "seconds")
        raise ValueError(f"{_quoted(text)}: unknown unit `{match[2]}` (steps, epochs, s, min, h)")

    def __str__(self) -> str:
        if self.unit != "seconds":
            return f"{self.value} {self.unit if self.value != 1 else self.unit[:-1]}"
        for unit, length in (("h", 3600), ("min", 60)):
            if self.value % length == 0:
                return f"{round(self.value / length)} {unit}"
        return f"{self.value} s"


def format_seconds(seconds: float) -> str:
    """For people: ``4.2 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 59.95:  # what would print as 60.0 is a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
