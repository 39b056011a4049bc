"""What one plain YAML scalar means: YAML 1.2 (``1e-5`` is a number, ``no`` is a word), and ``${ENV}`` in strings."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_YAML11_BOOLS = {"yes": True, "on": True, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?\d[\d_]*")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F_]+")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")
_SPECIAL = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}

# `$${` is an escaped `${`; then `${NAME}` and `${NAME:-default}`; then anything else that looks like an attempt.
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}|\$\{[^}]*\}?")


_SURROGATE = re.compile("[\ud800-\udfff]")
# Names that end so are those of credentials. No key takes one, and a recipe is written into the run's folder,
# its checkpoints and its trackers.
_CREDENTIAL = re.compile(
    r"(.*_)?(SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|(ACCESS|SECRET|PRIVATE)_KEY(_ID)?"
    r"|(HF|HUB|HUGGINGFACE|GITHUB|GH|ACCESS|AUTH|API|BEARER|SESSION)_TOKEN)",
    re.IGNORECASE,
)


class Word(str):
    """``yes``, ``no``, ``on`` or ``off``, unquoted: a boolean in YAML 1.1, text in YAML 1.2. The key's type decides."""

    @property
    def as_bool(self) -> bool:
        return _YAML11_BOOLS[self.lower()]


class Expanded(str):
    """Text that came out of the environment. Messages show `written`, never the value."""

    written: str

    @classmethod
    def of(cls, text: str, *, written: str) -> Expanded:
        expanded = cls(text)
        expanded.written = written
        return expanded


def number(text: str) -> int | float | None:
    """The number that `text` spells in any of YAML's and Python's ways, or None."""
    text = text.strip()
    if len(text) > 400:  # no number that a recipe can mean; Python refuses to read the longest ones
        return None
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEXADECIMAL.fullmatch(text):
        return int(text.replace("_", ""), 16)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    special = _SPECIAL.get(text.lower())
    return float(special) if special else None


def resolve(text: str) -> object:
    """The value of an unquoted scalar."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if text.lower() in _YAML11_BOOLS:
        return Word(text)
    value = number(text)
    return text if value is None else value


def expand(text: str, *, environment: Mapping[str, str]) -> str:
    """`text` with its variables filled in, once: what a variable holds is not expanded again.

    As in a shell, ``:-default`` serves when the variable is unset or empty. Raises ValueError for a variable that is
    not set, naming that variable and no other, and for one that holds a credential by its name.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name, default = match[1], match[2]
        if name is None:
            raise ValueError(
                f"{shown(match[0])} is not a variable: write ${{NAME}} or ${{NAME:-default}} ($${{ for the text)"
            )
        if _CREDENTIAL.fullmatch(name):
            raise ValueError(
                f"`{match[0]}` names a credential, and a recipe is written into the run's folder and its checkpoints; "
                "HF_TOKEN and WANDB_API_KEY are read from the environment where they are needed"
            )
        value = environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            raise ValueError(f"the environment variable {name} is not set; ${{{name}:-default}} gives a default")
        return value

    return _VARIABLE.sub(replacement, text)


def is_text(text: str) -> bool:
    """Whether it is text throughout: YAML's ``"\\ud800"``, and bytes of a command line that are no UTF-8, are not."""
    return text.isascii() or not _SURROGATE.search(text)


def scalar(text: str, *, quoted: bool, environment: Mapping[str, str]) -> object:
    """The value of a scalar as it stands in the file. Raises ValueError (see `expand`)."""
    if not is_text(text):
        raise ValueError("holds half a surrogate pair, which is no character")
    if "${" in text:
        filled = expand(text, environment=environment)
        if not is_text(filled):
            raise ValueError(f"`{text}` is no UTF-8 text")
        if not quoted and resolve(filled) is None:
            return None
        return Expanded.of(filled, written=text)
    return text if quoted else resolve(text)


def shown(value: object) -> str:
    """`value` for a message: short, on one line, without what came from the environment."""
    if isinstance(value, Expanded):
        return f"`{value.written}`"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = " ".join(str(value).split()).encode("utf-8", "backslashreplace").decode()
    return f"`{text[:57]}...`" if len(text) > 60 else f"`{text}`"
