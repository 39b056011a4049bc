"""From the columns of a row to what it says: a conversation, a prompt with its completion, or a text.

| format            | columns                                                                     |
|-------------------|-----------------------------------------------------------------------------|
| messages          | messages (or conversations): a list of {role, content}                       |
| sharegpt          | conversations (or messages): a list of {from, value}                         |
| alpaca            | instruction, output, and optionally input, system, history                   |
| prompt_completion | prompt, completion: two strings, or two lists of messages                    |
| text              | text                                                                        |

messages and sharegpt rows may also have columns ``system`` and ``tools``. A rename says which column stands
for which of these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from megatrain.data.messages import Message, Tool, as_messages, text_of
from megatrain.data.records import BadRow, Cause, json_of
from megatrain.errors import DataError

_LISTS = ("messages", "conversations", "conversation")
_COLUMNS = (*_LISTS, "prompt", "completion", "text", "instruction", "input", "output", "system", "history", "tools")
_NAMED, _LONGEST_NAME = 20, 60  # columns in a message
_RENAMED = frozenset({*_COLUMNS, "role", "content"}) - {"conversations", "conversation"}


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    prompt: int = 0  # so many messages belong to the prompt and are never trained on


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as plain text without a template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Plain text, trained on whole."""

    text: str


Content = Conversation | Completion | Text


class RowReader:
    """Reads the rows of one source.

    With ``format: auto`` the first row that fits a format decides for the whole source: later rows may have
    more columns or fewer, but not another format.
    """

    def __init__(self, format: str, *, columns: Mapping[str, str], system: str | None, tool_calls: bool) -> None:
        unknown = sorted(set(columns) - _RENAMED)
        if unknown:
            hint = f"a rename is `name: column`, with a name out of {', '.join(sorted(_RENAMED))}"
            raise DataError(f"data columns: {', '.join(unknown)} is no name of a column", hint=hint)
        self.format = None if format == "auto" else format
        self.wanted = frozenset({*_COLUMNS, *columns.values()})
        self._columns = columns
        self._system = system
        self._tool_calls = tool_calls  # whether the template prints message.tool_calls

    def read(self, row: Mapping[str, object]) -> Content:
        """What the row says. Raises BadRow."""
        format = self.format or self._detect(row)
        if format is None:
            raise BadRow(f"no format fits its columns ({_listed(row)})", cause=Cause.COLUMNS)
        content = self._READ[format](self, row)
        self.format = format
        return content

    def _detect(self, row: Mapping[str, object]) -> str | None:
        if self._list_column(row) is not None:
            return "messages"
        if self._has(row, "instruction") and self._has(row, "output"):
            return "alpaca"
        if self._has(row, "prompt") and self._has(row, "completion"):
            return "prompt_completion"
        return "text" if self._has(row, "text") else None

    def _messages(self, row: Mapping[str, object]) -> Content:
        column = self._list_column(row)
        if column is None:
            raise BadRow(f"has no column {self._name('messages')!r}", cause=Cause.COLUMNS)
        messages = self._read_messages(row[column], column=column)
        return Conversation(self._with_system(messages, row), tools=_tools(row.get(self._name("tools"))))

    def _alpaca(self, row: Mapping[str, object]) -> Content:
        instruction = self._text(row, "instruction")
        extra = self._optional(row, "input")
        turns: list[Message] = []
        for user, assistant in _pairs(row.get(self._name("history"))):
            turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        question = f"{instruction}\n{extra}" if extra else instruction
        answer = self._text(row, "output")
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Conversation(self._with_system(tuple(turns), row))

    def _prompt_completion(self, row: Mapping[str, object]) -> Content:
        prompt, completion = (row.get(self._name(name)) for name in ("prompt", "completion"))
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            asked = self._with_system(self._read_messages(prompt, column=self._name("prompt")), row)
            answer = self._read_messages(completion, column=self._name("completion"))
            return Conversation(asked + answer, tools=_tools(row.get(self._name("tools"))), prompt=len(asked))
        return Completion(self._text(row, "prompt", empty=True), self._text(row, "completion"))

    def _plain(self, row: Mapping[str, object]) -> Content:
        return Text(self._text(row, "text"))

    _READ: ClassVar = {
        "messages": _messages,
        "sharegpt": _messages,
        "alpaca": _alpaca,
        "prompt_completion": _prompt_completion,
        "text": _plain,
    }

    def _name(self, name: str) -> str:
        return self._columns.get(name, name)

    def _has(self, row: Mapping[str, object], name: str) -> bool:
        return self._name(name) in row

    def _list_column(self, row: Mapping[str, object]) -> str | None:
        names = (self._columns["messages"],) if "messages" in self._columns else _LISTS
        return next((name for name in names if name in row), None)

    def _read_messages(self, value: object, *, column: str) -> tuple[Message, ...]:
        return as_messages(
            value,
            column=column,
            role=self._columns.get("role"),
            content=self._columns.get("content"),
            tool_calls=self._tool_calls,
        )

    def _text(self, row: Mapping[str, object], name: str, *, empty: bool = False) -> str:
        column = self._name(name)
        if column not in row:
            raise BadRow(f"has no column {column!r}", cause=Cause.COLUMNS)
        text = text_of(row[column], what=repr(column))
        if not empty and not text.strip():
            raise BadRow(f"{column!r} is empty")
        return text

    def _optional(self, row: Mapping[str, object], name: str) -> str:
        value = row.get(self._name(name))
        return "" if value is None else text_of(value, what=repr(self._name(name)))

    def _with_system(self, messages: tuple[Message, ...], row: Mapping[str, object]) -> tuple[Message, ...]:
        """The row's own system turn, else its column, else the recipe's."""
        if messages and messages[0]["role"] == "system":
            return messages
        system = self._optional(row, "system") or self._system
        return ({"role": "system", "content": system}, *messages) if system else messages


def _listed(row: Mapping[str, object]) -> str:
    names = [str(name)[:_LONGEST_NAME] for name in islice(row, _NAMED)]
    return ", ".join(names) + (", ..." if len(row) > _NAMED else "") or "none"


def _tools(value: object) -> tuple[Tool, ...]:
    """Tool definitions, which many data sets keep as a JSON string."""
    if isinstance(value, str):
        value = json_of(value, what="'tools'") if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("'tools' is not a list of objects")
    return tuple(value)


def _pairs(value: object) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise BadRow("'history' is not a list of pairs")
    return [(text_of(user, what="'history'"), text_of(answer, what="'history'")) for user, answer in value]
