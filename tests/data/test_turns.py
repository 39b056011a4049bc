"""Which tokens are trained on: the assistant's turns, found in the joint tokenisation of any template."""

from __future__ import annotations

import numpy as np
import pytest
from data_kit import (
    ALWAYS_PROMPTING,
    BRACKETS,
    CHATML,
    GENERATION,
    HEADERS,
    STRICT,
    THINKING,
    TOOLS,
    assistant,
    byte_tokenizer,
    encode,
    system,
    text_of,
    tool,
    trained,
    user,
)

from megatrain.data.records import BadRow

CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]


@pytest.mark.parametrize("template", [CHATML, GENERATION, STRICT])
def test_every_answer_and_its_end_of_turn_token_are_trained(template: str) -> None:
    tokenizer = byte_tokenizer(template=template)
    sample = encode(tokenizer, user("one?"), assistant("1"), user("two?"), assistant("2, é 😀"))
    assert trained(tokenizer, sample) == ["1<|im_end|>", "2, é 😀<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, THINKING, ALWAYS_PROMPTING, BRACKETS, GENERATION, STRICT])
def test_tokens_are_those_of_the_template(template: str) -> None:
    tokenizer = byte_tokenizer(template=template)
    messages = [user("one?"), assistant("<think>\nso\n</think>\n\n1"), user("two?"), assistant(" 2 \n")]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert encode(tokenizer, *messages).tokens.tolist() == expected


def test_end_of_turn_token_may_be_the_eos_and_the_padding() -> None:
    tokenizer = byte_tokenizer(eos="<|im_end|>", pad="<|im_end|>")
    assert trained(tokenizer, encode(tokenizer, user("q"), assistant("a"))) == ["a<|im_end|>"]


def test_last_assistant_trains_the_last_answer_only() -> None:
    tokenizer = byte_tokenizer()
    sample = encode(
        tokenizer, user("a"), assistant("b"), user("c"), assistant("d"), user("e"), train_on="last_assistant"
    )
    assert trained(tokenizer, sample) == ["d<|im_end|>"]


def test_all_trains_everything_but_the_first_token() -> None:
    tokenizer = byte_tokenizer()
    sample = encode(tokenizer, user("a"), assistant("b"), train_on="all")
    assert not sample.supervised[0]
    assert sample.supervised[1:].all()


def test_a_message_of_weight_zero_is_not_trained() -> None:
    tokenizer = byte_tokenizer()
    sample = encode(tokenizer, user("a"), assistant("no", weight=0), user("c"), assistant("yes", weight=1))
    assert trained(tokenizer, sample) == ["yes<|im_end|>"]


def test_answers_equal_to_questions_are_told_apart() -> None:
    tokenizer = byte_tokenizer()
    sample = encode(tokenizer, user("hi"), assistant("hi"), user("hi"), assistant("hi"))
    assert trained(tokenizer, sample) == ["hi<|im_end|>", "hi<|im_end|>"]
    assert np.flatnonzero(sample.supervised)[0] > text_of(tokenizer, sample).index("hi")


def test_a_template_written_inside_a_message_does_not_mislead() -> None:
    tokenizer = byte_tokenizer()
    sample = encode(
        tokenizer,
        user("say <|im_start|>assistant\nx<|im_end|>"),
        assistant("a <|im_end|> b <|im_start|>assistant\n c"),
        user("<|im_start|>assistant\n"),
        assistant("z"),
    )
    assert trained(tokenizer, sample) == ["a <|im_end|> b <|im_start|>assistant\n c<|im_end|>", "z<|im_end|>"]


def test_an_inserted_think_block_is_the_assistants() -> None:
    tokenizer = byte_tokenizer(template=THINKING)
    sample = encode(tokenizer, user("1"), assistant("<think>\na\n</think>\n\nb"), user("2"), assistant("c"))
    assert trained(tokenizer, sample) == ["b<|im_end|>", "<think>\n\n</think>\n\nc<|im_end|>"]


@pytest.mark.parametrize("answer", ["r</think>a", "<think>\nr\n</think>\n\na"])
def test_thoughts_are_printed_once(answer: str) -> None:
    tokenizer = byte_tokenizer(template=THINKING)
    sample = encode(tokenizer, user("q"), assistant(answer))
    assert text_of(tokenizer, sample).count("</think>") == 1
    assert trained(tokenizer, sample) == ["<think>\nr\n</think>\n\na<|im_end|>"]


def test_a_prompt_that_is_always_printed_is_not_trained() -> None:
    tokenizer = byte_tokenizer(template=ALWAYS_PROMPTING)
    sample = encode(tokenizer, system("s"), user("q"), assistant("  a \n"), assistant("b"), user("q"), assistant("c"))
    assert trained(tokenizer, sample) == ["a<|eot|>", "b<|eot|>", "c<|eot|>"]
    assert text_of(tokenizer, sample).endswith("c<|eot|><|head|>assistant\n\n")


def test_the_question_may_hold_the_generation_prompt() -> None:
    tokenizer = byte_tokenizer(template=BRACKETS)
    sample = encode(tokenizer, user("q [/Q] x"), assistant("a"), user("q"), assistant("b"))
    assert trained(tokenizer, sample) == [" a</s>", " b</s>"]


def test_a_template_without_an_end_of_turn_token_gets_an_eos_after_the_last_answer() -> None:
    tokenizer = byte_tokenizer(template=HEADERS)
    sample = encode(tokenizer, user("q"), assistant("a"), user("r"), assistant("b"))
    assert text_of(tokenizer, sample) == "<|user|>\nq\n<|assistant|>\na\n<|user|>\nr\n<|assistant|>\nb</s>"
    assert trained(tokenizer, sample) == ["a", "b</s>"]


def test_the_clock_of_a_template_stands_still() -> None:
    dated = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}|{% set ask = strftime_now %}{{ ask('%B') }}|"
    tokenizer = byte_tokenizer(template=dated + CHATML)
    sample = encode(tokenizer, user("q"), assistant("a"))
    assert text_of(tokenizer, sample).startswith("26 Jul 2024|2024-07-26|July|<|im_start|>user")
    marked = byte_tokenizer(template=dated + GENERATION)
    assert trained(marked, encode(marked, user("q"), assistant("a"))) == ["a<|im_end|>"]


def test_exactly_one_bos() -> None:
    tokenizer = byte_tokenizer(template="{{ bos_token }}" + ALWAYS_PROMPTING, adds_bos=True)
    sample = encode(tokenizer, user("q"), assistant("a"))
    assert sample.tokens.tolist().count(tokenizer.bos_token_id) == 1
    assert sample.tokens[0] == tokenizer.bos_token_id
    assert trained(tokenizer, sample) == ["a<|eot|>"]


@pytest.mark.parametrize("template", [STRICT, BRACKETS])
def test_a_system_turn_is_folded_where_the_template_has_none(template: str) -> None:
    tokenizer = byte_tokenizer(template=template)
    sample = encode(tokenizer, system("be brief"), user("q"), assistant("a"))
    assert "be brief\n\nq" in text_of(tokenizer, sample)
    with pytest.raises(BadRow, match="no user turn"):
        encode(tokenizer, system("be brief"), assistant("a"))


def test_a_short_system_turn_is_not_taken_for_printed_because_its_letters_are() -> None:
    tokenizer = byte_tokenizer(template=BRACKETS)
    assert "Q\n\nwhy" in text_of(tokenizer, encode(tokenizer, system("Q"), user("why"), assistant("a")))


def test_a_role_that_the_template_drops_is_refused_by_name() -> None:
    with pytest.raises(BadRow, match=r"does not print message 3 \(role 'tool'\)"):
        encode(byte_tokenizer(template=BRACKETS), user("q"), assistant("a"), tool("a"), assistant("b"))


def test_what_the_template_refuses_is_a_bad_row_and_no_traceback() -> None:
    with pytest.raises(BadRow, match="roles must alternate"):
        encode(byte_tokenizer(template=STRICT), user("q"), user("r"), assistant("a"))
    with pytest.raises(BadRow, match="the chat template refuses it"):
        encode(byte_tokenizer(template="{{ messages[0].nothing.at_all }}"), user("q"), assistant("a"))
    for broken in ("{{ 1 / 0 }}", "{% for i in range(10 ** 9) %}x{% endfor %}"):
        with pytest.raises(BadRow, match="the chat template refuses it"):
            encode(byte_tokenizer(template=broken), user("q"), assistant("a"))


def test_users_may_speak_twice_where_the_template_lets_them() -> None:
    tokenizer = byte_tokenizer()
    sample = encode(tokenizer, user("first"), user("second"), assistant("a"))
    assert "first" in text_of(tokenizer, sample)
    assert "second" in text_of(tokenizer, sample)


def test_tool_calls_are_trained_and_results_are_not() -> None:
    tokenizer = byte_tokenizer(template=TOOLS)
    sample = encode(tokenizer, user("q"), assistant("", tool_calls=CALL), tool("sun"), assistant("ok", tool_calls=CALL))
    call = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call><|im_end|>'
    assert trained(tokenizer, sample) == [call, "ok" + call]


def test_a_tool_call_that_is_not_printed_is_refused() -> None:
    with pytest.raises(BadRow, match="does not print the tool call in message 2"):
        encode(byte_tokenizer(), user("what weather"), assistant("", tool_calls=CALL), assistant("sun"))


def test_a_conversation_without_an_answer_is_refused() -> None:
    with pytest.raises(BadRow, match="no message of the assistant"):
        encode(byte_tokenizer(), user("q"))


def test_answers_are_found_where_marks_would_disturb_the_template() -> None:
    picky = CHATML.replace("m['content']", "('OK ' if m['content'].startswith('a') else '') + m['content']")
    tokenizer = byte_tokenizer(template=picky)
    sample = encode(tokenizer, user("1: abc"), assistant("abc"), user("2: b"), assistant("b"))
    assert trained(tokenizer, sample) == ["OK abc<|im_end|>", "b<|im_end|>"]
    private = encode(tokenizer, user("\U000f0000"), assistant("x\U000f0001y"))
    assert trained(tokenizer, private) == ["x\U000f0001y<|im_end|>"]


def test_a_tokenizer_of_merged_tokens_trains_a_token_across_the_border() -> None:
    from data_kit import recipe

    from megatrain.data import load_tokenizer

    tokenizer = load_tokenizer(recipe("unused.jsonl"))
    glued = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    tokenizer.chat_template = glued + "{% endfor %}"
    sample = encode(tokenizer, user("And the Lo"), assistant("rd said"))
    assert trained(tokenizer, sample) == [" Lord said<|endoftext|>"]  # " Lord" is one token
