"""The recipe loader: a file, its base, and overrides. An input is these three, divided by lines of equals signs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzz.mutations import WORDS, broken, junk, mutated
from fuzz.target import Target
from megatrain.recipe import load_recipe, recipe_from_dict
from megatrain.recipe.suggest import all_keys

DIVIDER = b"\n=====\n"
WHOLE: dict[str, Any] = {
    "model": {"path": "m", "init": "random", "config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
    "tokenizer": {"path": None, "chat_template": "{{ messages }}"},
    "data": {
        "train": [{"path": "a.jsonl", "columns": {"prompt": "q"}, "weight": 2.0, "limit": 3}, "b.jsonl"],
        "eval": "c.jsonl",
        "max_seq_len": 64,
        "system": "Be kind.",
    },
    "train": {"epochs": 2, "steps": 10, "batch_size": 4, "max_grad_norm": 1.0, "save_every": "30 min", "freeze": []},
    "optimizer": {"lr": 1e-5, "betas": [0.9, 0.99], "warmup": 0.1, "schedule": "wsd"},
    "memory": {"vram": "24GiB", "host": "1 TB", "device": "cpu", "slots": 2},
    "output": {"dir": "runs/x", "keep": 3},
    "report": {"tensorboard": False},
}


def read_recipe(data: bytes, folder: Path) -> None:
    """A recipe that is accepted must survive its own YAML."""
    main, *rest = data.split(DIVIDER)
    (folder / "main.yaml").write_bytes(main)
    (folder / "base.yaml").write_bytes(rest[0] if rest else b"base: main.yaml\n")
    overrides = rest[1].decode("utf-8", "surrogateescape").split("\n") if len(rest) > 1 else []
    recipe = load_recipe(str(folder / "main.yaml"), overrides=[text for text in overrides if text])
    (folder / "again.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(folder / "again.yaml")) == recipe
    assert recipe_from_dict(recipe.to_dict()) == recipe


def _yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):
        return b"a: [" * 3000


_PIECES = st.sampled_from(
    [
        *("a: ", "- ", "? ", "&a ", "*a", "<<: *a", "!!python/object/apply:os.system ", "!!binary ", "{", "}", "["),
        *("]", ",", "|\n", ">\n", "'", '"', "#", "---\n", "...\n", "%YAML 1.1\n", "\n", "\n  ", "\t", ": ", "model:"),
        *("path: ", "base: ", "base.yaml", "main.yaml", "${HOME}", "${", "$${", "~", "\\x", "\ufeff", "data:"),
        *("train: ", *WORDS),
    ]
)
_TEXT = st.lists(_PIECES, max_size=30).map(lambda parts: "".join(parts).encode("utf-8", "surrogatepass"))
_MAIN = mutated(WHOLE).map(_yaml) | _TEXT | broken([_yaml(WHOLE)])
_BASED = mutated({"base": "base.yaml", "train": {"seed": 1}}).map(_yaml)
_KEYS = [*all_keys(), "data.train.0.path", "data.train.5.limit", "model.config.a.b", "x", "", "base"]
_SCALAR = junk().map(lambda value: "[[[1]]]" if isinstance(value, list | dict) else str(value))
_OVERRIDE = st.tuples(st.sampled_from(_KEYS), _SCALAR | _TEXT.map(lambda text: text.decode("utf-8", "replace"))).map(
    lambda pair: f"{pair[0]}={pair[1]}".replace("\n", " ").encode("utf-8", "surrogatepass")
)

RECIPES = (
    Target("recipe", read_recipe, _MAIN),
    Target(
        "recipe-base",
        read_recipe,
        st.tuples(_BASED, _MAIN, st.lists(_OVERRIDE, max_size=3).map(b"\n".join)).map(DIVIDER.join),
    ),
    Target(
        "recipe-set",
        read_recipe,
        st.lists(_OVERRIDE, min_size=1, max_size=4).map(lambda o: DIVIDER.join((_yaml(WHOLE), b"", b"\n".join(o)))),
    ),
)
