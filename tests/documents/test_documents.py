"""What the documents say of files, keys and commands is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.recipe import load_recipe, shipped_recipes
from megatrain.recipe.schema import Recipe, Source

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items()}
KEYS = {
    *(f"{name}.{key}" for name, section in SECTIONS.items() for key in section.model_fields),  # type: ignore[union-attr]
    *(f"data.train.{key}" for key in Source.model_fields),
}


def fences(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def test_the_reference_is_what_the_schema_says() -> None:
    done = subprocess.run([sys.executable, "scripts/recipe_doc.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run: python scripts/recipe_doc.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", path.read_text())
    missing = [link for link in links if not (path.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_recipes_in_documents_are_recipes(path: Path, tmp_path: Path) -> None:
    for index, text in enumerate(fences(path.read_text(), "yaml")):
        recipe = tmp_path / f"{index}.yaml"
        recipe.write_text(text)
        assert load_recipe(str(recipe)).model.path


def test_the_readme_shows_the_quickstart_as_it_is(tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(fences((ROOT / "README.md").read_text(), "yaml")[0])
    assert load_recipe(str(shown)) == load_recipe(str(shipped_recipes()["quickstart"]))


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_dotted_keys_in_documents_exist(path: Path) -> None:
    pattern = rf"\b((?:{'|'.join(SECTIONS)})\.[a-z_]+)\b"
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    prose = re.sub(r"`cgroup .*?`|[\w/]+/[\w.*]+|\w+\.(?:jsonl?|md)\b", "", prose)  # files are not keys
    unknown = {key for key in re.findall(pattern, prose) if key not in KEYS}
    assert unknown == set()


def test_every_key_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "recipe.md").read_text()
    for name, section in SECTIONS.items():
        for key in section.model_fields:  # type: ignore[union-attr]
            assert f"| `{key}` |" in text, f"{name}.{key}"


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set(re.findall(r"make ([a-z0-9-]+)", (ROOT / "README.md").read_text()))
    assert {"quickstart", "test"} <= named
    assert named <= targets
