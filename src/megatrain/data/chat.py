"""From a conversation to the text that a chat template prints, with every message in it.

A message that the template would drop is never lost silently: a system turn is folded into the first user
turn (as ``system + blank line + user``), anything else makes the row a bad one, with its role named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatrain.data.bounded import Exhausted, bounded
from megatrain.data.formats import Conversation
from megatrain.data.messages import Message, Tool
from megatrain.data.records import BadRow
from megatrain.errors import DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "megatrainprobe"
_STANDING_CLOCK = {  # 26 July 2024, noon
    "Y": "2024", "y": "24", "m": "07", "B": "July", "b": "Jul", "d": "26", "A": "Friday", "a": "Fri", "j": "208",
    "H": "12", "I": "12", "p": "PM", "M": "00", "S": "00",
}  # fmt: skip
_PROBE_CALL = {"name": _PROBE, "arguments": {}}
_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class Manner:
    """How a template writes an assistant's turn, seen on a conversation of two messages."""

    generation_prompt: str | None  # what it prints before an answer; None: not to be told apart
    ending: re.Pattern[str] | None  # what may follow an answer up to its end-of-turn token; None: no such token
    closing: str  # that token, "" without one


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            plain, with_tools = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])
        except ValueError as error:
            raise DataError(
                "the data are conversations, but the tokenizer has no chat template",
                where=_KEY,
                hint="set tokenizer.chat_template to a .jinja file or to the template itself, "
                "or give the data as prompt_completion or text",
            ) from error
        self._tokenizer = tokenizer
        self._sources = {False: _without_clock(plain), True: _without_clock(with_tools)}
        self.marks_turns = _GENERATION.search(plain) is not None
        self.prints_tools = re.search(r"\btools\b", with_tools) is not None
        self._printed: dict[tuple[object, ...], bool] = {}
        self.manner = self._learn()

    def text(
        self, messages: Sequence[Message], *, tools: tuple[Tool, ...] = (), generation_prompt: bool = False
    ) -> str:
        """What the template prints, as it is. Raises BadRow if it cannot."""
        with _rendering():
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._sources[bool(tools)],
                add_generation_prompt=generation_prompt,
                tokenize=False,
            )
        assert isinstance(text, str)
        return text

    def generation_spans(self, conversation: Conversation) -> list[tuple[int, int]]:
        """The characters [start, end) inside ``{% generation %}`` blocks."""
        named: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        with _rendering():
            printed: Any = render_jinja_template(
                [list(conversation.messages)],
                tools=list(conversation.tools) or None,
                chat_template=self._sources[bool(conversation.tools)],
                return_assistant_tokens_mask=True,
                **named,
            )
        return [(start, end) for start, end in printed[1][0]]

    def print(self, conversation: Conversation) -> tuple[Conversation, str]:
        """The text with every message in it, and the conversation as it was printed. Raises BadRow."""
        system = conversation.messages[0]["role"] == "system" and len(conversation.messages) > 1
        try:
            text = self.text(conversation.messages, tools=conversation.tools)
            folded = system and not self._prints(conversation, number=0, text=text)
        except BadRow:
            if not system:
                raise
            folded = True
        if folded:
            conversation = _fold_system(conversation)
            text = self.text(conversation.messages, tools=conversation.tools)
        for number, message in enumerate(conversation.messages):
            if not self._prints(conversation, number=number, text=text):
                raise BadRow(f"the chat template does not print message {number + 1} (role {message['role']!r})")
            if _calls(message) and not self._prints_calls(conversation, number=number):
                raise BadRow(f"the chat template does not print the tool call in message {number + 1}")
        return conversation, text

    def _prints(self, conversation: Conversation, *, number: int, text: str) -> bool:
        """Whether a message that is not the assistant's is in the text, if need be in another form.

        That the words are somewhere in the text proves nothing where they are short, so each kind of place
        is tried once with a word of its own.
        """
        messages = conversation.messages
        role = messages[number]["role"]
        if role == "assistant":
            return True
        before = messages[number - 1]["role"] if number else None
        place = (role, before, number == len(messages) - 1)
        if self._printed.get(place) and str(messages[number]["content"]).strip() in text:
            return True
        probe = [*messages[:number], {**messages[number], "content": _PROBE}, *messages[number + 1 :]]
        self._printed[place] = _PROBE in self.text(probe, tools=conversation.tools)
        return self._printed[place]

    def _prints_calls(self, conversation: Conversation, *, number: int) -> bool:
        """Whether the template prints tool calls, tried on the first message that has some."""
        place = ("tool_calls",)
        if place not in self._printed:
            messages = list(conversation.messages)
            messages[number] = {**messages[number], "tool_calls": [{"type": "function", "function": _PROBE_CALL}]}
            self._printed[place] = _PROBE in self.text(messages, tools=conversation.tools)
        return self._printed[place]

    def _learn(self) -> Manner:
        question, answer = _PROBE + "q", _PROBE + "a"
        probe: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            whole = self.text(probe)
            asked = self.text(probe[:1], generation_prompt=True)
            plain = self.text(probe[:1])
        except BadRow:
            return Manner(None, None, "")
        prompt = None
        if asked != plain and asked.startswith(plain):
            prompt = asked[len(plain) :]
        elif whole.startswith(asked):  # always printed (Llama 3), or a part of the user's turn (Mistral)
            prompt = asked.partition(question)[2] or None
        rest = whole.partition(answer)[2]
        tokens = _added_tokens(self._tokenizer)
        found = re.search(tokens, rest)
        if not found:
            return Manner(prompt, None, "")
        return Manner(prompt, re.compile(rf"(?:{re.escape(rest[: found.start()])}|\s*)(?:{tokens})"), found.group())


@contextmanager
def _rendering() -> Iterator[None]:
    """Around a template at work. Raises DataError for a broken or endless one, BadRow for what it refuses."""
    try:
        with bounded():
            yield
    except Exhausted as limit:
        hint = "no template needs that for one row; use the one that belongs to the model"
        raise DataError(f"the chat template {limit} on one row", where=_KEY, hint=hint) from None
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template is broken in line {error.lineno}: {error.message}", where=_KEY) from error
    except SyntaxError as error:  # Jinja took it, but the Python that Jinja made of it is none: a break without a loop
        raise DataError(f"the chat template is broken: {error.msg}", where=_KEY) from error
    except Exception as error:  # a program of somebody else, on a row that it was not made for
        raise BadRow(f"the chat template refuses it: {error}") from error


def _without_clock(template: str) -> str:
    """The template with a clock that stands still, if it asks for the time.

    With today's date in it the data would change overnight, and no run could be resumed or repeated. The date is
    the one that Llama's templates print where there is no clock.
    """
    if "strftime_now" not in template:
        return template
    replaced = "".join(f" | replace('%{letter}', '{value}')" for letter, value in _STANDING_CLOCK.items())
    return "{%- macro strftime_now(format) -%}{{- format" + replaced + " -}}{%- endmacro -%}" + template


def _added_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """An expression for the tokens that a tokenizer never builds out of text, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    return "|".join(re.escape(token) for token in sorted(added, key=lambda t: (-len(t), t)) if token.strip()) or r"\Z."


def _fold_system(conversation: Conversation) -> Conversation:
    system, *messages = conversation.messages
    for number, message in enumerate(messages):
        if message["role"] == "user":
            messages[number] = {**message, "content": f"{system['content']}\n\n{message['content']}"}
            return replace(conversation, messages=tuple(messages), prompt=max(conversation.prompt - 1, 0))
    raise BadRow("the chat template has no system role, and there is no user turn to put it into")


def _calls(message: Message) -> list[dict[str, object]]:
    """The function calls of a message, each with its name and arguments."""
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, list) else []
    functions = [call.get("function", call) for call in listed if isinstance(call, dict)]
    return [function for function in functions if isinstance(function, dict)]
