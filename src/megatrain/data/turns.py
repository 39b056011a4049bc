"""Where in a printed conversation the assistant's turns are.

The text is printed and tokenised as a whole, once, so its tokens are those of inference. A turn begins where
the generation prompt ends (an inserted ``<think>`` block is the assistant's) and ends with its end-of-turn
token (what the template prints after it is not). Templates that mark turns with ``{% generation %}`` say so
themselves. Elsewhere an answer that stands in the text once, right behind the generation prompt, is where it
seems to be; other answers are printed a second time between two private-use characters, which show where they
went. If these disturb the template (it must print the same text around them), the answer is looked
for instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from megatrain.data.chat import ChatTemplate
from megatrain.data.formats import Conversation
from megatrain.data.records import BadRow

_MARKS = 0xF0000  # first character of private use area A, which has 65,534
_MOST_MESSAGES = 32_000
_MARK = re.compile("[\U000f0000-\U000ffffd]")


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a text."""

    start: int
    end: int


@dataclass(frozen=True)
class Printed:
    """A conversation as text, and the turns that are trained on."""

    text: str
    spans: tuple[Span, ...]
    needs_eos: bool  # the template ends no turn with a token, so the last one needs the tokenizer's EOS


def print_conversation(conversation: Conversation, *, template: ChatTemplate, train_on: str) -> Printed:
    """The text of a conversation with the spans to train on. Raises BadRow."""
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise BadRow("no message of the assistant")
    if len(conversation.messages) > _MOST_MESSAGES:
        raise BadRow(f"more than {_MOST_MESSAGES} messages")
    conversation, text = template.print(conversation)
    ends_open = template.manner.ending is None and conversation.messages[-1]["role"] == "assistant"
    if ends_open:  # nothing may stand between the answer and the EOS that follows it
        text = text.rstrip()
    if train_on == "all":
        return Printed(text, (Span(0, len(text)),), needs_eos=ends_open)
    turns = _Finder(template, conversation=conversation, text=text).turns()
    if ends_open:
        last = max(turns)
        turns[last] = replace(turns[last], end=len(text))
    trained = {number: span for number, span in turns.items() if _is_trained(conversation, number=number)}
    chosen = sorted(trained)[-1:] if train_on == "last_assistant" else sorted(trained)
    return Printed(text, tuple(trained[number] for number in chosen), needs_eos=ends_open)


def _is_trained(conversation: Conversation, *, number: int) -> bool:
    """Not in the prompt, and not switched off by ``weight: 0`` (a convention of chat data)."""
    return number >= conversation.prompt and conversation.messages[number].get("weight") != 0


class _Finder:
    """Finds the turns of one conversation. A `core` is an answer's own text, without what is printed around it."""

    def __init__(self, template: ChatTemplate, *, conversation: Conversation, text: str) -> None:
        self._template = template
        self._manner = template.manner
        self._messages = conversation.messages
        self._conversation = conversation
        self._text = text
        self._numbers = [i for i, message in enumerate(self._messages) if message["role"] == "assistant"]

    def turns(self) -> dict[int, Span]:
        if self._template.marks_turns:
            spans = self._template.generation_spans(self._conversation)
            if len(spans) == len(self._numbers):
                pairs = zip(self._numbers, spans, strict=True)
                return {i: Span(start, self._end(Span(start, end), number=i, start=start)) for i, (start, end) in pairs}
        cores = self._obvious() or self._marked()
        turns: dict[int, Span] = {}
        border = 0  # no turn begins before the last one's end
        for number in self._numbers:
            core = cores.get(number) if cores is not None else self._searched(number, border=border)
            start = self._start(core, number=number, border=border)
            border = self._end(core, number=number, start=start)
            turns[number] = Span(start, border)
        return turns

    def _obvious(self) -> dict[int, Span] | None:
        """Cores, where each stands in the text once only and right behind a generation prompt. None: not so."""
        prompt = self._manner.generation_prompt
        cores: dict[int, Span] = {}
        for number in self._numbers:
            answer = str(self._messages[number]["content"]).strip()
            at = self._text.find(answer) if answer and prompt else -1
            if (
                prompt is None
                or at < 0
                or self._text.find(answer, at + 1) >= 0
                or not self._text.endswith(prompt, 0, at)
            ):
                return None
            cores[number] = Span(at, at + len(answer))
        return cores

    def _marked(self) -> dict[int, Span] | None:
        """Cores, seen by the marks around them. None: the template printed something else, or marks were there."""
        if _MARK.search(self._text):
            return None
        messages = list(self._messages)
        for number in self._numbers:
            content = str(messages[number]["content"])
            core = content.strip()
            if core:
                before, _, after = content.partition(core)
                marked = f"{before}{chr(_MARKS + 2 * number)}{core}{chr(_MARKS + 2 * number + 1)}{after}"
                messages[number] = {**messages[number], "content": marked}
        try:
            printed = self._template.text(messages, tools=self._conversation.tools)
        except BadRow:
            return None
        plain = _MARK.sub("", printed)
        if plain != self._text and plain.rstrip() != self._text:
            return None
        places: dict[int, int] = {}
        for count, match in enumerate(_MARK.finditer(printed)):
            mark = ord(match.group()) - _MARKS
            if mark in places:
                return None  # an answer printed twice
            places[mark] = match.start() - count
        ends = {number: places[2 * number + 1] for number in self._numbers if 2 * number + 1 in places}
        return {
            number: Span(places[2 * number], end) if 2 * number in places else self._core_before(end, number=number)
            for number, end in ends.items()
        }

    def _core_before(self, end: int, *, number: int) -> Span:
        """What is left of an answer that ends at `end` after the template cut or moved its beginning."""
        answer = str(self._messages[number]["content"]).strip()
        shared = 0
        while shared < min(len(answer), end) and answer[-1 - shared] == self._text[end - 1 - shared]:
            shared += 1
        start = end - shared
        while start < end and self._text[start].isspace():
            start += 1
        return Span(start, end)

    def _searched(self, number: int, *, border: int) -> Span | None:
        before = self._before(number)
        answer = str(self._messages[number]["content"]).strip()
        for core in (answer, answer.rpartition("</think>")[2].strip()):
            at = self._text.find(core, max(border, len(before))) if core else -1
            if at >= 0:
                return Span(at, at + len(core))
        return None

    def _before(self, number: int) -> str:
        """What would be the prompt of this turn, if the whole text begins with it; "" otherwise."""
        try:
            before = self._template.text(
                self._messages[:number], tools=self._conversation.tools, generation_prompt=True
            )
        except BadRow:
            return ""
        return before if self._text.startswith(before) else ""

    def _start(self, core: Span | None, *, number: int, border: int) -> int:
        """Where the generation prompt of this turn ends."""
        prompt = self._manner.generation_prompt
        if core is not None and prompt:
            at = self._text.rfind(prompt, border, core.start)
            if at >= 0:
                return at + len(prompt)
        before = len(self._before(number))
        if before and border <= before <= (len(self._text) if core is None else core.start):
            return before
        if core is not None:
            return core.start
        at = self._text.find(prompt, border) if prompt else -1
        if prompt is None or at < 0:
            raise BadRow(f"the chat template does not show where message {number + 1} (assistant) begins")
        return at + len(prompt)

    def _end(self, core: Span | None, *, number: int, start: int) -> int:
        """Where the turn's end-of-turn token ends; where its text ends if the template prints none."""
        done = start if core is None else core.end
        if self._manner.ending is None:
            return done
        if core is None or self._messages[number].get("tool_calls"):  # a call is printed after the answer's text
            at = self._text.find(self._manner.closing, done)
            return at + len(self._manner.closing) if at >= 0 else done
        match = self._manner.ending.match(self._text, done)
        return match.end() if match else done
