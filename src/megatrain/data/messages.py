"""The messages of a conversation as chat templates expect them: known roles, texts that are texts, no nulls."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megatrain.data.records import BadRow, json_of

Message = dict[str, Any]
"""{"role": system|user|assistant|tool, "content": str, ...}; further keys (tool_calls, ...) are the template's."""

Tool = dict[str, Any]
"""The definition of a function, as a JSON schema."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}


def text_of(value: object, *, what: str) -> str:
    """A text that can be tokenised; numbers are written out, null is never the word None."""
    if value is None:
        raise BadRow(f"{what} is null")
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadRow(f"{what} is not a text")
    if isinstance(value, float) and not math.isfinite(value):  # how tables write what is missing
        raise BadRow(f"{what} is {value}, not a text")
    return value if isinstance(value, str) else json.dumps(value)


def as_messages(
    value: object, *, column: str, role: str | None, content: str | None, tool_calls: bool
) -> tuple[Message, ...]:
    """The list in a row's column. `role` and `content` are the keys to look for; None: the usual ones."""
    if isinstance(value, str):  # csv, and exports that keep lists as JSON
        if not value.lstrip().startswith("["):
            raise BadRow(f"{column!r} is a text, not a list of messages")
        value = json_of(value, what=repr(column))
    if value is None:
        raise BadRow(f"{column!r} is null")
    if not isinstance(value, list):
        raise BadRow(f"{column!r} is not a list of messages")
    if not value:
        raise BadRow(f"{column!r} is empty")
    return tuple(
        _message(item, number=number, role=role, content=content, tool_calls=tool_calls)
        for number, item in enumerate(value, start=1)
    )


def _message(item: object, *, number: int, role: str | None, content: str | None, tool_calls: bool) -> Message:
    if not isinstance(item, Mapping):
        raise BadRow(f"message {number} is not an object")
    role_key = role or ("role" if "role" in item else "from")
    content_key = content or ("content" if "content" in item else "value")
    written = item.get(role_key)
    if not isinstance(written, str):
        raise BadRow(f"message {number} has no {role_key!r}")
    known = _ROLES.get(written.strip().lower())
    if known is None:
        raise BadRow(f"message {number} has the unknown role {written!r}")
    # Tables fill what a message lacks with nulls; a template must not take them for something said.
    rest = {key: value for key, value in item.items() if key not in (role_key, content_key) and value is not None}
    if known == "function_call":
        call = text_of(item.get(content_key), what=f"the content of message {number}")
        return {**rest, **_function_call(call, structured=tool_calls)}
    text = _content(item.get(content_key), number=number, role=known, called=bool(rest.get("tool_calls")))
    if known == "assistant" and not text.strip() and not rest.get("tool_calls"):
        raise BadRow(f"the answer in message {number} is empty")
    return {**rest, "role": known, "content": text}


def _content(value: object, *, number: int, role: str, called: bool) -> str:
    if value is None and called and role == "assistant":
        return ""
    if isinstance(value, list):  # parts of a multimodal message
        if not all(isinstance(part, Mapping) and part.get("type", "text") == "text" for part in value):
            raise BadRow(f"the content of message {number} has parts that are not text")
        return "".join(text_of(part.get("text"), what=f"the content of message {number}") for part in value)
    return text_of(value, what=f"the content of message {number} ({role})")


def _function_call(text: str, *, structured: bool) -> Message:
    """A sharegpt function call: as tool_calls where the template prints them, as it is written elsewhere."""
    if structured:
        calls = json_of(text, what="a function call")
        listed = [call for call in (calls if isinstance(calls, list) else [calls]) if isinstance(call, dict)]
        complete = not isinstance(calls, list) or len(listed) == len(calls)
        if listed and complete and all("name" in call for call in listed):
            functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in listed]
            return {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function} for function in functions],
            }
    return {"role": "assistant", "content": text}
