"""Write docs/memory.md: the prose of docs/memory.in.md with tables that `megatrain estimate-memory` computes.

python scripts/memory_doc.py             # writes docs/memory.md
python scripts/memory_doc.py --check     # exit 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatrain.cli.estimate_command import BARE_RECIPE
from megatrain.recipe import load_recipe
from megatrain.train.estimate import Estimate, estimate_memory
from megatrain.train.machine import Described
from megatrain.units import format_size

ROOT = Path(__file__).resolve().parent.parent
DOCS, SHAPES = ROOT / "docs", ROOT / "benchmarks" / "shapes"
NOTE = "<!-- Made by scripts/memory_doc.py from docs/memory.in.md: edit that. -->\n"
GIB = 1 << 30
CORES, LINK = 16, 25_000_000_000
FAMILY = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
CARD = 24 * GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = render((DOCS / "memory.in.md").read_text())
    target = DOCS / "memory.md"
    if not parser.parse_args().check:
        target.write_text(text)
    elif not target.is_file() or target.read_text() != text:
        sys.exit(f"{target} is not up to date\nhint: make docs")


def render(source: str) -> str:
    """The document with each line `<!-- table: NAME -->` replaced. Raises KeyError for a name that is not known."""
    lines = []
    for line in source.splitlines():
        name = line.removeprefix("<!-- table: ").removesuffix(" -->") if line.startswith("<!-- table: ") else None
        lines += [line] if name is None else TABLES[name]()
    return NOTE + "\n".join(lines) + "\n"


def estimated(shape: str, *settings: str, vram: int, host: int, largest: bool = False) -> Estimate:
    """On a machine of which nothing but what is given counts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shape.yaml")
        path.write_text(BARE_RECIPE.format(path=f"'{SHAPES / shape}'"))
        recipe = load_recipe(str(path), overrides=settings)
    described = Described(vram=vram, host=host, link=LINK, cores=CORES)
    return estimate_memory(recipe, described=described, largest=largest)


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [row(head), row(["---"] * len(head)), *(row(cells) for cells in rows)]


def purposes() -> list[str]:
    """One plan by purpose."""
    found = estimated("qwen2.5-7b", vram=CARD, host=128 * GIB)
    rows = [("host", name, size) for name, size in found.host.items()]
    rows += [("device", name, size) for name, size in found.plan.device.items()]
    rows += [("disk", name, size) for name, size in found.disk.items()]
    return table(("where", "purpose", "bytes"), [(where, name, format_size(size)) for where, name, size in rows])


def published() -> list[str]:
    """Configurations that others published, on paper."""
    cases = (
        ("120B dense", "1.5 TB of host memory", "dense-120b", 141 * GIB, 1_500_000_000_000, ()),
        ("120B dense", "the same, bf16 moments", "dense-120b", 141 * GIB, 1_500_000_000_000, ("optimizer.state=bf16",)),
        ("14B", "one 24 GB card, 256 GiB", "qwen2.5-14b", 24_000_000_000, 256 * GIB, ()),
        ("14B", "the same, batch 8", "qwen2.5-14b", 24_000_000_000, 256 * GIB, ("train.batch_size=8",)),
        ("Mixtral-8x7B", "one card of 10 GiB, 768 GiB", "mixtral-8x7b", 10 * GIB, 768 * GIB, ()),
        ("Mixtral-8x7B", "one 24 GB card, 768 GiB", "mixtral-8x7b", 24_000_000_000, 768 * GIB, ()),
        ("7B, 512k tokens of context", "one 141 GiB card, 256 GiB", "qwen2.5-7b", 141 * GIB, 256 * GIB, LONG),
        ("the same, 256k", "one 141 GiB card, 192 GiB", "qwen2.5-7b", 141 * GIB, 192 * GIB, SHORTER),
        ("the same, 64k", "one 24 GB card, 128 GiB", "qwen2.5-7b", 24_000_000_000, 128 * GIB, SHORT),
    )
    rows = []
    for what, machine, shape, vram, host, settings in cases:
        found = estimated(shape, *settings, vram=vram, host=host)
        verdict = "fits" if found.fits else f"does not fit: {_short(found)}"
        rows.append((what, machine, _size(found.plan.host_total), _size(found.plan.device_total), verdict))
    return table(("model", "machine", "host", "device", "verdict"), rows)


LONG = ("train.batch_size=1", "data.max_seq_len=524288", "model.config={max_position_embeddings: 1048576}")
SHORTER = ("train.batch_size=1", "data.max_seq_len=262144", "model.config={max_position_embeddings: 1048576}")
SHORT = ("train.batch_size=1", "data.max_seq_len=65536")


def by_host() -> list[str]:
    """What so much host memory can train beside a 24 GiB card."""
    rows = []
    for gib in (32, 64, 128, 256, 512):
        cells = [f"{gib} GiB"]
        for settings in ((), ("optimizer.state=bf16",)):
            cells += _largest_of_family(gib, settings)
        rows.append(cells)
    head = (
        "host memory",
        "largest Qwen2.5, fp32 moments",
        "any shape of it",
        "largest, bf16 moments",
        "any shape of it",
    )
    return table(head, rows)


def _largest_of_family(gib: int, settings: tuple[str, ...]) -> list[str]:
    fitting = [s for s in FAMILY if estimated(s, *settings, *SMALL, vram=CARD, host=gib * GIB).fits]
    any_shape = estimated("qwen2.5-7b", *settings, *SMALL, vram=CARD, host=gib * GIB, largest=True).largest
    assert any_shape is not None
    name = fitting[-1].removeprefix("qwen2.5-").upper() if fitting else "none"
    return [name, f"{any_shape.model_params / 1e9:.1f} B"]


SMALL = ("train.batch_size=8", "data.max_seq_len=2048")


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _short(found: Estimate) -> str:
    plan, lacks = found.plan, []
    if plan.device_limit is not None and not plan.device_fits:
        lacks.append(f"the device lacks {format_size(plan.device_total - plan.device_limit.bytes)}")
    if plan.host_total > plan.host_limit.bytes:
        lacks.append(f"host memory lacks {_size(plan.host_total - plan.host_limit.bytes)}")
    return " and ".join(lacks)


TABLES: dict[str, Callable[[], list[str]]] = {"purposes": purposes, "published": published, "by_host": by_host}


if __name__ == "__main__":
    main()
