"""Small tokenizers, chat templates and recipes for the tests of the data room. Nothing is downloaded."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatrain.data import Prepared, Samples, prepare
from megatrain.data.encode import Encoded, Encoder
from megatrain.data.formats import Conversation
from megatrain.recipe import Recipe, recipe_from_dict

KJV = "megatrain:kjv-tiny"
SPECIALS = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|eot|>", "<|head|>")

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The last answer, and answers after the last question, get a block of thoughts; earlier ones lose theirs.
THINKING = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}{% set said = m.content %}"
    "{% set thought = '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.asked %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Trims what is said, and prints the generation prompt whether one asks for it or not.
ALWAYS_PROMPTING = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m['role'] + '\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{{ '<|head|>assistant\n\n' }}"
)
# Knows two roles and drops the others without a word; the generation prompt is the end of the question.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[Q] ' + m['content'] + ' [/Q]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Raises on a system turn and where user and assistant do not alternate.
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# No token ends a turn: headers are all there is.
HEADERS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.function | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(
    *, template: str | None = CHATML, eos: str = "</s>", pad: str | None = "<pad>", adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """One token for each byte, and the special ones: what a token stands for can be read off."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        pad_token=pad,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def user(text: object, **more: object) -> dict[str, object]:
    return {"role": "user", "content": text, **more}


def assistant(text: object, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def system(text: object) -> dict[str, object]:
    return {"role": "system", "content": text}


def tool(text: object) -> dict[str, object]:
    return {"role": "tool", "content": text}


def encode(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, object], train_on: str = "assistant") -> Encoded:
    """A conversation's tokens and labels."""
    encoder = Encoder(tokenizer, train_on=train_on)
    return encoder.encode([encoder.draft(Conversation(tuple(messages)))])[0]


def trained(tokenizer: PreTrainedTokenizerFast, sample: Any) -> list[str]:
    """The supervised stretches of a sample, as text."""
    groups = itertools.groupby(zip(sample.tokens.tolist(), sample.supervised.tolist(), strict=True), lambda p: p[1])
    return [tokenizer.decode([token for token, _ in group]) for supervised, group in groups if supervised]


def text_of(tokenizer: PreTrainedTokenizerFast, sample: Any) -> str:
    return tokenizer.decode(sample.tokens.tolist())


def recipe(train: object, *, sections: dict[str, object] | None = None, **data: object) -> Recipe:
    values = {"model": {"path": KJV}, "output": {"dir": "unused"}, **(sections or {})}
    return recipe_from_dict({**values, "data": {"train": train, "max_seq_len": 256, **data}})


def prepared(
    train: object, *, tokenizer: PreTrainedTokenizerFast | None = None, max_positions: int | None = None, **data: object
) -> Prepared:
    return prepare(
        recipe(train, **data), tokenizer=tokenizer or byte_tokenizer(), max_positions=max_positions, vocab_size=None
    )


def write_jsonl(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    return str(path)


def texts(samples: Samples, *, tokenizer: PreTrainedTokenizerFast | None = None) -> list[str]:
    tokenizer = tokenizer or byte_tokenizer()
    return [tokenizer.decode(sample.tokens.tolist()) for sample in samples]
