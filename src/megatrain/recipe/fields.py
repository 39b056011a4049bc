"""The types of recipe values: what each accepts from YAML, and what it says when it cannot.

Each raises PydanticCustomError with the finished message, so that no pydantic wording reaches the user.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from megatrain.recipe.scalars import Expanded, Word, is_text, number, shown
from megatrain.units import Duration, exact_size, parse_size

_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, on Linux
_LARGEST = 2**63 - 1  # what a seed, a size or a counter can hold


def mistake(text: str) -> PydanticCustomError:
    return PydanticCustomError("recipe", "{text}", {"text": text})


def to_number(value: object) -> float:
    found = number(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise mistake(f"must be a number, not {shown(value)}")
    if not abs(found) <= sys.float_info.max:
        raise mistake(f"must be a finite number, not {shown(value)}")
    return float(found)


def to_integer(value: object) -> int:
    found = number(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise mistake(f"must be a whole number, not {shown(value)}")
    if not abs(found) <= _LARGEST:
        raise mistake(f"must be a whole number below 2^63, not {shown(value)}")
    if found != int(found):
        raise mistake(f"must be a whole number, not {shown(value)}")
    return int(found)


def to_flag(value: object) -> bool:
    if isinstance(value, Word):
        return value.as_bool
    if isinstance(value, Expanded) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if isinstance(value, bool):
        return value
    raise mistake(f"must be true or false, not {shown(value)}")


def to_text(value: object) -> str:
    if isinstance(value, Word):
        raise mistake(f'`{value}` is a boolean to YAML 1.1: write "{value}" in quotes if the text is meant')
    if isinstance(value, (bool, int, float)):
        raise mistake(
            f'must be text, not {shown(value)}: write "{shown(value).strip("`")}" in quotes if the text is meant'
        )
    if not isinstance(value, str):
        raise mistake(f"must be text, not {shown(value)}")
    if not value.strip():
        raise mistake("must not be empty")
    if not is_text(value):
        raise mistake(f"must be text, and {shown(value)} is no UTF-8")
    return str(value)


def to_path(value: object) -> str:
    text = to_text(value)
    if "\0" in text:
        raise mistake("must be a path, which holds no null character")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise mistake(f"there is no home folder of such a user: {shown(text)}; ./~ is a name that begins with ~")
    if len(os.fsencode(path)) > _LONGEST_PATH or any(len(os.fsencode(p)) > _LONGEST_NAME for p in path.split("/")):
        raise mistake(f"must be a path, and {shown(text)} is too long for one")
    return path


def to_template(value: object) -> str:
    text = to_text(value)
    return text if "\n" in text or "{" in text else os.path.expanduser(text)


def to_choice(value: object) -> object:
    """Words such as ``off`` are text where the choices are named."""
    return str(value) if isinstance(value, str) else value


def plain_values(value: object) -> Any:
    """Any YAML, with unquoted yes/no/on/off refused: nothing says whether text or a boolean is meant."""
    if isinstance(value, Word):
        raise mistake(f'`{value}` is a boolean to YAML 1.1 and text to YAML 1.2: write true, false, or "{value}"')
    if isinstance(value, Mapping):
        return {str(key): plain_values(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(child) for child in value]
    if isinstance(value, Expanded):
        found = number(value)
        value = str(value) if found is None else found
    if isinstance(value, float) and not math.isfinite(value):
        raise mistake(f"must hold finite numbers, not {shown(value)}")
    return value


def to_overrides(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise mistake(f"must be a mapping, not {shown(value)}")
    return dict(plain_values(value))


def to_renames(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise mistake(f"must be a mapping like {{prompt: question}}, not {shown(value)}")
    return {str(key): to_text(child) for key, child in value.items()}


def to_bytes(value: object) -> int | str:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    try:
        size = parse_size(value)  # type: ignore[arg-type]  # refuses other types with its own message
    except ValueError as error:
        text = f"must be auto or a size like 24GiB, not {shown(value)}" if isinstance(value, Expanded) else str(error)
        raise mistake(text) from error
    if size <= 0:
        raise mistake(f"must be more than nothing, not {shown(value)}")
    return size


def auto_or_count(minimum: int) -> Callable[[object], int | str]:
    def check(value: object) -> int | str:
        if isinstance(value, str) and value.lower() == "auto":
            return "auto"
        try:
            count = to_integer(value)
        except PydanticCustomError as error:
            raise mistake(f"must be auto or a whole number, not {shown(value)}") from error
        if count < minimum:
            raise mistake(f"must be at least {minimum}, not {shown(value)}")
        return count

    return check


def interval(*, clock: bool) -> Callable[[object], Duration | None]:
    """Steps or epochs, and with `clock` also time."""

    def check(value: object) -> Duration | None:
        if value is None or isinstance(value, Duration):
            return value
        try:
            duration = Duration.parse(value)  # type: ignore[arg-type]  # refuses other types with its own message
        except ValueError as error:
            raise mistake(
                f"{shown(value)} is not an interval" if isinstance(value, Expanded) else str(error)
            ) from error
        if duration.unit == "seconds" and not clock:
            raise mistake(f'must be a number of steps or "1 epoch", not {shown(value)}')
        return duration

    return check


def written_interval(duration: Duration | None) -> str | int | None:
    if duration is None:
        return None
    return int(duration.value) if duration.unit == "steps" else str(duration)


def to_expressions(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise mistake(f"must be a list of regular expressions, not {shown(value)}")
    for pattern in value:
        try:
            re.compile(to_text(pattern))
        except re.error as error:
            raise mistake(f"{shown(pattern)} is not a regular expression: {error}") from error
    return tuple(str(pattern) for pattern in value)


def to_betas(value: object) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)):
        raise mistake(f"must be a list of two numbers, not {shown(value)}")
    if len(value) != 2:
        raise mistake(f"must be a list of two numbers, not of {len(value)}")
    first, second = (to_number(item) for item in value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise mistake(f"both must be at least 0 and less than 1, not [{first:g}, {second:g}]")
    return first, second


def to_device(value: object) -> str:
    text = to_text(value)
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise mistake(f"must be auto, cuda, cuda:N or cpu, not {shown(value)}")
    return text


def to_gradient_norm(value: object) -> float | None:
    if value is None:
        return None
    norm = to_number(value)
    if norm <= 0:
        raise mistake(f"must be more than 0, not {shown(value)}; null turns clipping off")
    return norm


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


_SIZE_SCHEMA = [{"const": "auto"}, {"type": "integer", "exclusiveMinimum": 0}, {"type": "string"}]


def _auto_schema(minimum: int) -> WithJsonSchema:
    return _schema(anyOf=[{"const": "auto"}, {"type": "integer", "minimum": minimum}])


def _interval_schema() -> WithJsonSchema:
    return _schema(anyOf=[{"type": "null"}, {"type": "integer", "minimum": 1}, {"type": "string"}])


Text = Annotated[str, BeforeValidator(to_text)]
PathText = Annotated[str, BeforeValidator(to_path)]
Template = Annotated[str, BeforeValidator(to_template)]
Flag = Annotated[bool, BeforeValidator(to_flag)]
Natural = Annotated[int, Field(ge=0), BeforeValidator(to_integer)]
Count = Annotated[int, Field(ge=1), BeforeValidator(to_integer)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(to_number)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(to_number)]
Share = Annotated[float, Field(ge=0, le=1), BeforeValidator(to_number)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1), BeforeValidator(to_number)]
Size = Annotated[
    int | Literal["auto"],
    PlainValidator(to_bytes),
    PlainSerializer(lambda size: exact_size(size) if isinstance(size, int) else size),
    _schema(anyOf=_SIZE_SCHEMA),
]
AutoCount = Annotated[int | Literal["auto"], PlainValidator(auto_or_count(1)), _auto_schema(1)]
AutoSlots = Annotated[int | Literal["auto"], PlainValidator(auto_or_count(2)), _auto_schema(2)]
StepsOrEpochs = Annotated[
    Duration | None, PlainValidator(interval(clock=False)), PlainSerializer(written_interval), _interval_schema()
]
Interval = Annotated[
    Duration | None, PlainValidator(interval(clock=True)), PlainSerializer(written_interval), _interval_schema()
]
GradientNorm = Annotated[
    float | None,
    PlainValidator(to_gradient_norm),
    _schema(anyOf=[{"type": "null"}, {"type": "number", "exclusiveMinimum": 0}]),
]
Betas = Annotated[
    tuple[float, float],
    BeforeValidator(to_betas),
    _schema(type="array", items={"type": "number", "minimum": 0, "exclusiveMaximum": 1}, minItems=2, maxItems=2),
]
Expressions = Annotated[
    tuple[str, ...], BeforeValidator(to_expressions), _schema(type="array", items={"type": "string"})
]
DeviceName = Annotated[str, PlainValidator(to_device), _schema(type="string", pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Renames = Annotated[
    dict[str, str],
    BeforeValidator(to_renames),
    _schema(type="object", additionalProperties={"type": "string"}),
]
Overrides = Annotated[dict[str, Any], BeforeValidator(to_overrides), _schema(type="object")]
