"""The reference in two forms, both made from the schema: a commented recipe, and JSON Schema for editors."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from megatrain.recipe.schema import Recipe, Source
from megatrain.recipe.suggest import sections

_EXAMPLES = {
    "model.path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data.train": "data/train.jsonl",
    "output.dir": "runs/first",
}
_COLUMN = 46


def template() -> str:
    """A recipe with every key, its default and its meaning, which passes `recipe check` as it stands."""
    lines = [
        "# Every key with its default; only model.path, data.train and output.dir must be given.",
        "# base: other.yaml        inherits from another recipe.   ${ENV} and ${ENV:-default} expand in values.",
    ]
    for name, section in sections().items():
        lines += ["", f"# {Recipe.model_fields[name].description}", f"{name}:"]
        for key, field in section.model_fields.items():
            lines += [_line(key, field=field, example=_EXAMPLES.get(f"{name}.{key}"))]
            if f"{name}.{key}" == "data.train":
                lines += _source_lines()
    return "\n".join(lines) + "\n"


def _source_lines() -> list[str]:
    lines = ["  # or a list, of paths and of mappings:", "  # train:"]
    for index, (key, field) in enumerate(Source.model_fields.items()):
        written = _line(key, field=field, example=_EXAMPLES["data.train"] if key == "path" else None).strip()
        lines.append(f"  #   {'- ' if index == 0 else '  '}{written}")
    return lines


def _line(key: str, *, field: FieldInfo, example: str | None) -> str:
    value = f"  {key}: {example or _inline(field.get_default(call_default_factory=True))}"
    choices = _choices(field)
    meaning = f"{' | '.join(choices)}; {field.description}" if choices else field.description
    return f"{value:<{_COLUMN - 2}}  # {meaning}"


def _inline(value: Any) -> str:
    if isinstance(value, float):
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _choices(field: FieldInfo) -> list[str]:
    if get_origin(field.annotation) is Literal:
        return [str(choice) for choice in get_args(field.annotation)]
    return []


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a recipe file."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "megatrain recipe"
    schema["description"] = "Full fine-tuning of a language model, as one file"
    schema["properties"] = {
        "base": {"type": "string", "description": "a recipe to inherit from, relative to this one"},
        **schema["properties"],
    }
    # A recipe with a base may leave out what the base gives.
    schema.pop("required")
    source = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Source"}]}
    sources = {"anyOf": [*source["anyOf"], {"type": "array", "items": source, "minItems": 1}]}
    data = schema["$defs"]["Data"]["properties"]
    data["train"] = {**sources, "description": data["train"]["description"]}
    data["eval"] = {
        "anyOf": [{"type": "null"}, *sources["anyOf"]],
        "default": None,
        "description": data["eval"]["description"],
    }
    for name, definition in schema["$defs"].items():
        if name != "Source":
            definition.pop("required", None)
    return schema
