"""What a row says in each format, and why it may say nothing."""

from __future__ import annotations

import json

import pytest
from data_kit import assistant, system, user

from megatrain.data.formats import Completion, Conversation, RowReader, Text
from megatrain.data.records import BadRow
from megatrain.errors import DataError

CHAT = (user("q"), assistant("a"))


def reader(format: str = "auto", *, tool_calls: bool = False, system: str | None = None, **columns: str) -> RowReader:
    return RowReader(format, columns=columns, system=system, tool_calls=tool_calls)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [user("q"), assistant("a")]}, Conversation(CHAT)),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Conversation(CHAT)),
        ({"conversations": [user("q"), assistant("a")]}, Conversation(CHAT)),
        ({"messages": json.dumps([user("q"), assistant("a")])}, Conversation(CHAT)),
        ({"messages": [user([{"type": "text", "text": "q"}]), assistant("a")]}, Conversation(CHAT)),
        ({"system": "s", "messages": [user("q"), assistant("a")]}, Conversation((system("s"), *CHAT))),
        ({"system": None, "messages": [user("q"), assistant("a")]}, Conversation(CHAT)),
        ({"system": "", "messages": [system("t"), *CHAT]}, Conversation((system("t"), *CHAT))),
        ({"instruction": "q", "input": "", "output": "a"}, Conversation(CHAT)),
        ({"instruction": "q", "input": None, "output": "a"}, Conversation(CHAT)),
        ({"instruction": "q", "output": "a", "system": "s"}, Conversation((system("s"), *CHAT))),
        ({"instruction": "q", "input": "i", "output": "a"}, Conversation((user("q\ni"), assistant("a")))),
        (
            {"instruction": "q", "output": "a", "history": [["h", "i"]]},
            Conversation((user("h"), assistant("i"), *CHAT)),
        ),
        ({"prompt": "q", "completion": "a"}, Completion("q", "a")),
        ({"prompt": [user("q")], "completion": [assistant("a")]}, Conversation(CHAT, prompt=1)),
        ({"text": "t", "other": None}, Text("t")),
    ],
)
def test_the_format_is_seen_from_the_columns(row: dict[str, object], expected: object) -> None:
    assert reader().read(row) == expected


def test_renames() -> None:
    assert reader(prompt="q", completion="a").read({"q": "x", "a": "y", "text": "z"}) == Completion("x", "y")
    assert reader("text", text="body").read({"body": "b", "text": "z"}) == Text("b")
    chat = reader(messages="conv", role="who", content="says")
    row = {"conv": [{"who": "user", "says": "q"}, {"who": "assistant", "says": "a"}]}
    assert chat.read(row) == Conversation(CHAT)
    with pytest.raises(DataError, match="promt is no name of a column"):
        reader(promt="q")


def test_the_first_row_decides_and_later_ones_are_held_to_it() -> None:
    rows = reader()
    with pytest.raises(BadRow, match=r"no format fits its columns \(title\)"):
        rows.read({"title": "t"})
    assert rows.read({"text": "t"}) == Text("t")
    with pytest.raises(BadRow, match="has no column 'text'"):
        rows.read({"messages": [user("q"), assistant("a")]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": None}, "'text' is null"),
        ({"text": " \n"}, "'text' is empty"),
        ({"text": ["a"]}, "'text' is not a text"),
        ({"instruction": "q", "output": None}, "'output' is null"),
        ({"instruction": None, "output": "a"}, "'instruction' is null"),
        ({"prompt": "q", "completion": None}, "'completion' is null"),
        ({"prompt": "q", "completion": ""}, "'completion' is empty"),
        ({"prompt": None, "completion": "a"}, "'prompt' is null"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": "hello"}, "'messages' is a text, not a list of messages"),
        ({"messages": {"role": "user"}}, "'messages' is not a list of messages"),
        ({"messages": ["hello"]}, "message 1 is not an object"),
        ({"messages": [user(None), assistant("a")]}, "the content of message 1 (user) is null"),
        ({"messages": [user("q"), assistant(None)]}, "the content of message 2 (assistant) is null"),
        ({"messages": [user("q"), assistant("  ")]}, "the answer in message 2 is empty"),
        ({"messages": [user("q"), {"role": "assistant"}]}, "the content of message 2 (assistant) is null"),
        ({"messages": [{"content": "q"}]}, "message 1 has no 'from'"),
        ({"messages": [{"role": None, "content": "q"}]}, "message 1 has no 'role'"),
        ({"messages": [user("q"), {"role": "wizard", "content": "a"}]}, "message 2 has the unknown role 'wizard'"),
        ({"messages": [user([{"type": "image", "url": "x"}])]}, "the content of message 1 has parts that are not text"),
        ({"conversations": [{"from": "human", "value": None}]}, "the content of message 1 (user) is null"),
        ({"messages": [user("q"), assistant("a")], "tools": "{"}, "'tools' is not JSON"),
        ({"messages": [user("q"), assistant("a")], "tools": {"a": 1}}, "'tools' is not a list of objects"),
    ],
)
def test_a_bad_row_says_why(row: dict[str, object], reason: str) -> None:
    with pytest.raises(BadRow) as caught:
        reader().read(row)
    assert str(caught.value).startswith(reason)


@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython"])
def test_what_tools_answer_is_kept_in_its_place(role: str) -> None:
    row = {"messages": [user("q"), assistant("c"), {"role": role, "content": "r"}, assistant("a")]}
    content = reader().read(row)
    assert isinstance(content, Conversation)
    assert [m["role"] for m in content.messages] == ["user", "assistant", "tool", "assistant"]


def test_function_calls_of_sharegpt() -> None:
    call = '{"name": "f", "arguments": {"x": 1}}'
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": call}]}
    structured = reader(tool_calls=True).read(row)
    assert isinstance(structured, Conversation)
    assert structured.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    assert reader().read(row) == Conversation((user("q"), assistant(call)))


def test_nulls_that_tables_put_into_messages_are_not_handed_to_templates() -> None:
    row = {"messages": [user("q", tool_calls=None, name=None), assistant("a", tool_calls=None, name="n")]}
    assert reader().read(row) == Conversation((user("q"), assistant("a", name="n")))


def test_a_null_content_is_fine_beside_a_tool_call() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    content = reader().read({"messages": [user("q"), assistant(None, tool_calls=calls)]})
    assert content == Conversation((user("q"), assistant("", tool_calls=calls)))


def test_tools_may_be_json_text() -> None:
    row = {"messages": [user("q"), assistant("a")], "tools": '[{"name": "f"}]'}
    assert reader().read(row) == Conversation(CHAT, tools=({"name": "f"},))


def test_the_recipes_system_turn_is_for_rows_without_one() -> None:
    rows = reader(system="R")
    assert rows.read({"messages": list(CHAT)}) == Conversation((system("R"), *CHAT))
    assert rows.read({"messages": [system("own"), *CHAT]}) == Conversation((system("own"), *CHAT))
    assert rows.read({"messages": list(CHAT), "system": "col"}) == Conversation((system("col"), *CHAT))
