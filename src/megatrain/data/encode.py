"""From what rows say to tokens and labels, a batch at a time through the tokenizer's own threads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatrain.data.chat import ChatTemplate
from megatrain.data.formats import Completion, Content, Conversation, Text
from megatrain.data.growth import Growth
from megatrain.data.records import BadRow
from megatrain.data.samples import Flags, Tokens
from megatrain.data.tokenizer import is_panic
from megatrain.data.turns import Span, print_conversation
from megatrain.errors import DataError


@dataclass(frozen=True)
class Draft:
    """A row as one text, before it is tokenised."""

    text: str
    spans: tuple[Span, ...]  # characters to be trained on
    plain: bool  # not from a template: the tokenizer adds its BOS
    needs_eos: bool  # ends with exactly one EOS, supervised
    is_text: bool  # format text, which is split rather than cut
    drops_tools: bool = False  # it declares tools that the template does not print

    @property
    def whole(self) -> bool:
        return self.spans == (Span(0, len(self.text)),)


@dataclass(frozen=True)
class Encoded:
    tokens: Tokens  # [T]
    supervised: Flags  # [T]


class Encoder:
    """Turns contents into drafts (in Python, one by one) and drafts into tokens (in Rust, a batch at once)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, train_on: str) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._growth = Growth.of_backend(self._backend)
        self._train_on = train_on
        self._bos: int | None = tokenizer.bos_token_id
        self._eos: int | None = tokenizer.eos_token_id

    @cached_property
    def template(self) -> ChatTemplate:
        """Read when the first conversation comes: texts need none."""
        return ChatTemplate(self._tokenizer)

    @property
    def prints_tool_calls(self) -> bool:
        return "tool_calls" in str(self._tokenizer.chat_template or "")

    @property
    def eos(self) -> int:
        if self._eos is None:
            hint = "set eos_token in the tokenizer's tokenizer_config.json"
            raise DataError("the tokenizer has no EOS token, which must end every text", hint=hint)
        return self._eos

    @property
    def pad(self) -> int:
        """What rows are filled up with: a token that the model has for certain, unlike a pad token added later."""
        return self._eos or 0

    def draft(self, content: Content) -> Draft:
        """Raises BadRow."""
        match content:
            case Conversation():
                printed = print_conversation(content, template=self.template, train_on=self._train_on)
                drops = bool(content.tools) and not self.template.prints_tools
                draft = Draft(printed.text, printed.spans, False, printed.needs_eos, False, drops)
            case Completion(prompt, completion):
                text = prompt + completion
                start = 0 if self._train_on == "all" else len(prompt)
                draft = Draft(text, (Span(start, len(text)),), True, True, False)
            case Text(text):
                draft = Draft(text, (Span(0, len(text)),), True, True, True)
        _refuse_surrogates(draft.text)
        self._growth.check(draft.text)
        return draft

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """Tokens and labels of each draft, before anything is cut."""
        results: dict[int, Encoded] = {}
        for plain in (False, True):
            for whole in (False, True):
                chosen = [i for i, draft in enumerate(drafts) if draft.plain == plain and draft.whole == whole]
                # Offsets cost as much as the tokens; where everything is trained on nobody asks for them.
                run = self._backend.encode_batch_fast if whole else self._backend.encode_batch
                codes = self._codes(run, [drafts[i].text for i in chosen], plain=plain) if chosen else []
                for index, code in zip(chosen, codes, strict=True):
                    results[index] = self._finish(code, draft=drafts[index])
        return [results[index] for index in range(len(drafts))]

    def _codes(self, run: Any, texts: list[str], *, plain: bool) -> Any:
        try:
            return run(texts, add_special_tokens=plain)
        except BaseException as error:  # an expression that it gave up, a token that its vocabulary lacks
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hint = "its tokenizer.json is damaged, or not made for such texts"
            raise DataError(f"the tokenizer fails: {reason}", where="tokenizer.path", hint=hint) from error

    def _finish(self, code: Any, *, draft: Draft) -> Encoded:
        tokens = np.asarray(code.ids, np.int32)
        supervised = np.ones(len(tokens), np.bool_) if draft.whole else _covered(code.offsets, spans=draft.spans)
        while len(tokens) > 1 and self._bos is not None and tokens[0] == tokens[1] == self._bos:
            tokens, supervised = tokens[1:], supervised[1:]  # one from the tokenizer, one from the template or the text
        if draft.needs_eos:
            while draft.plain and len(tokens) > 1 and tokens[-1] == self.eos:
                tokens, supervised = tokens[:-1], supervised[:-1]
            if not len(tokens) or tokens[-1] != self.eos or draft.plain:
                tokens = np.append(tokens, np.int32(self.eos))
                supervised = np.append(supervised, True)
        supervised[:1] = False  # it has no predecessor
        return Encoded(tokens, supervised)


def _covered(offsets: list[tuple[int, int]], *, spans: tuple[Span, ...]) -> Flags:
    """[T] Which tokens lie in a span, or reach into one: a token across the border holds the answer's beginning.

    Offsets rise from token to token, so each border is found by bisection. Byte-level tokenizers trim white space
    off them: a token of nothing but space has the width 0 and stands at its own end.
    """
    count = len(offsets)
    while count and offsets[count - 1] == (0, 0):  # what the tokenizer adds at the end stands nowhere in the text
        count -= 1
    covered = np.zeros(len(offsets), np.bool_)
    for span in spans:
        first = bisect_right(offsets, span.start, hi=count, key=itemgetter(1))
        last = bisect_right(offsets, (span.end, span.end), hi=count)
        covered[first:last] = True
    return covered


def _refuse_surrogates(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRow("holds half a surrogate pair, which is no character") from error
