"""Write docs/recipe.md: the prose of docs/recipe.in.md with a table for every section of the schema.

python scripts/recipe_doc.py             # writes docs/recipe.md
python scripts/recipe_doc.py --check     # exit 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatrain.recipe.schema import Recipe, Source

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Made by scripts/recipe_doc.py from docs/recipe.in.md and the schema: edit those. -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = render((DOCS / "recipe.in.md").read_text())
    target = DOCS / "recipe.md"
    if not parser.parse_args().check:
        target.write_text(text)
    elif not target.is_file() or target.read_text() != text:
        sys.exit(f"{target} is not up to date\nhint: make docs")


def render(source: str) -> str:
    """The document with each line `<!-- table: NAME -->` replaced. Raises KeyError for a name the schema lacks."""
    sections = tables()
    wanted = re.findall(r"^<!-- table: (\w+) -->$", source, flags=re.M)
    missing = sections.keys() - set(wanted)
    if missing:
        raise ValueError(f"sections without a table: {', '.join(sorted(missing))}")
    body = re.sub(r"^<!-- table: (\w+) -->$", lambda match: sections[match[1]], source, flags=re.M)
    return NOTE + body


def tables() -> dict[str, str]:
    """A markdown table for every section of the recipe, by its name, and one for `source`."""
    found: dict[str, type[BaseModel]] = {"source": Source}
    for name, field in Recipe.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation
    return {name: table(section) for name, section in found.items()}


def table(section: type[BaseModel]) -> str:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in section.model_fields.items():
        default = (
            "*must be given*" if field.is_required() else f"`{plain(field.get_default(call_default_factory=True))}`"
        )
        lines.append(f"| `{key}` | {default} | {meaning(field)} |")
    return "\n".join(lines)


def meaning(field: FieldInfo) -> str:
    choices = [f"`{choice}`" for choice in get_args(field.annotation) if isinstance(choice, str)]
    text = (field.description or "").replace("|", "\\|")
    return f"{', '.join(choices)}; {text}" if choices else text


def plain(value: Any) -> str:
    """A default as one would write it in YAML."""
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < value < 1e-3 else str(value)
    shown = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
    return shown.removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    main()
