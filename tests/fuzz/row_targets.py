"""The row readers, through formats, template and tokenizer to labels; chat templates; tokenizers."""

from __future__ import annotations

import csv
import io
import json
import shutil
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from data.data_kit import CHATML, GENERATION, THINKING, TOOLS, byte_tokenizer, recipe
from fuzz.mutations import WORDS, as_json, broken, junk, mutated
from fuzz.target import Target
from megatrain.data import load_tokenizer, prepare
from megatrain.recipe import resolve_asset

FORMATS = ("auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text")
ROWS_OF_ALL_KINDS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
            {"role": "assistant", "content": "Hello.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "4", "name": "f"},
            {"role": "assistant", "content": "Four.", "weight": 0},
        ],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    },
    {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "function_call", "value": '{"name": "f"}'},
                       {"from": "observation", "value": "1"}, {"from": "gpt", "value": "Hello."}], "system": "x"},
    {"instruction": "Add", "input": "1 1", "output": "2", "history": [["a", "b"]]},
    {"prompt": "Two and", "completion": " two"},
    {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
    {"text": "In the beginning"},
]  # fmt: skip


@cache
def _tokenizer(template: str) -> Any:
    return byte_tokenizer(template=template)


def _prepare(path: Path, *, data: bytes, template: str) -> None:
    """Which format and policy are tried follows from the data, so that an input says all."""
    mark = zlib.crc32(data)
    renames = {"content": "value"} if mark % 7 == 0 else {}
    run = recipe(
        {"path": str(path), "format": FORMATS[mark % len(FORMATS)], "columns": renames},
        bad_rows=("skip", "error")[mark // 8 % 2],
        train_on=("assistant", "last_assistant", "all")[mark // 16 % 3],
        max_seq_len=(16, 256)[mark // 64 % 2],
    )
    prepared = prepare(run, tokenizer=_tokenizer(template), max_positions=None, vocab_size=None)
    samples = prepared.train
    assert len(samples) > 0
    assert samples.supervised_count > 0
    assert not samples.supervised[samples.starts[:-1]].any()
    json.dumps(prepared.report.to_dict(), allow_nan=False)


def _reads(suffix: str) -> Any:
    def read(data: bytes, folder: Path) -> None:
        path = folder / f"rows.{suffix}"
        path.write_bytes(data)
        _prepare(path, data=data, template=(CHATML, THINKING, GENERATION, TOOLS)[len(data) % 4])

    return read


def read_template(data: bytes, folder: Path) -> None:
    """The input is a chat template, tried on a few conversations."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(as_json(row) + b"\n" for row in ROWS_OF_ALL_KINDS[:2]))
    _prepare(path, data=data, template=data.decode("utf-8", "replace"))


def read_tokenizer(data: bytes, folder: Path) -> None:
    """The input is a tokenizer.json beside good other files."""
    shutil.copytree(resolve_asset("megatrain:kjv-tiny"), folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer.json").write_bytes(data)
    (folder / "rows.jsonl").write_bytes(b'{"text": "In the beginning was the word"}\n')
    run = recipe(str(folder / "rows.jsonl"), sections={"tokenizer": {"path": str(folder / "tokenizer")}})
    prepare(run, tokenizer=load_tokenizer(run), max_positions=None, vocab_size=2048)


def _jsonl(rows: list[Any]) -> bytes:
    return b"\n".join(map(as_json, rows))


def _csv(rows: list[Any]) -> bytes:
    names = list(dict.fromkeys(str(name) for row in rows if isinstance(row, dict) for name in row)) or ["text"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    for row in rows:
        cells = row if isinstance(row, dict) else {}
        writer.writerow([v if isinstance(v := cells.get(name, ""), str) else as_json(v).decode() for name in names])
    return text.getvalue().encode("utf-8", "surrogatepass")


def _table(rows: list[Any]) -> pyarrow.Table:
    try:
        return pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)] or [{"text": None}])
    except (pyarrow.ArrowException, UnicodeError, OverflowError, TypeError, ValueError, RecursionError):
        return pyarrow.table({"text": ["a", None, "c"], "messages": [[{"role": "user", "content": None}]] * 3})


def _parquet(rows: list[Any]) -> bytes:
    sink = io.BytesIO()
    try:
        parquet.write_table(_table(rows), sink)
    except (pyarrow.ArrowException, ValueError):  # a struct without fields
        parquet.write_table(pyarrow.table({"text": ["a"]}), sink)
    return sink.getvalue()


def _arrow(rows: list[Any], *, framed: bool) -> bytes:
    sink = io.BytesIO()
    table = _table(rows)
    with (ipc.new_file if framed else ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


_SOME = st.sampled_from(ROWS_OF_ALL_KINDS).flatmap(lambda row: st.lists(mutated(row) | junk(), max_size=3))
_TEMPLATE_PIECES = st.sampled_from(
    [
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{{ m['role'] }}",
        "{% if m.role == 'user' %}",
        "{% endif %}",
        "{% else %}",
        "{% set x = [0] %}",
        "{% set ns = namespace(a='a') %}",
        "{% set ns.a = ns.a + ns.a %}",
        "{% generation %}",
        "{% endgeneration %}",
        "{{ bos_token }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ 'a' * 100000 }}",
        "{{ 1 / 0 }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}",
        "{{ f(1) }}",
        "{% break %}",
        "{{ messages ~ 1 }}",
        "{{ strftime_now('%Y') }}",
        "{{ range(1000000) }}",
        "{{ '%s' % messages }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ x[5] }}",
        "{{ tools }}",
        "<<im_end>>",
        "",
        "{{ lipsum() }}",
        "{{ cycler }}",
        "{% include 'x' %}",
        "{% import '/etc/passwd' as p %}",
        "{% extends 'a' %}",
        "{{ ",
    ]
)
_TOKENIZER = json.loads((resolve_asset("megatrain:kjv-tiny") / "tokenizer.json").read_text())
_VOCABULARY = dict(list(_TOKENIZER["model"]["vocab"].items())[:260])
_SMALL = _TOKENIZER | {"model": _TOKENIZER["model"] | {"vocab": _VOCABULARY, "merges": []}}
_SHELL = {key: value for key, value in _SMALL.items() if key != "model"}
_PARTS = st.sampled_from(
    [
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "ByteLevel", "add_prefix_space": True},
        {"type": "Prepend", "prepend": "x" * 1000},
        {"type": "Sequence", "normalizers": []},
        {"type": "NFKC"},
        None,
    ]
)
_MODEL = {key: value for key, value in _SMALL["model"].items() if key != "vocab"}


def _with_model(model: Any) -> bytes:
    return as_json(_SMALL | {"model": {"vocab": _VOCABULARY} | model if isinstance(model, dict) else model})


_TOKENIZERS = (
    mutated(_SHELL).map(lambda shell: _SMALL | shell if isinstance(shell, dict) else shell).map(as_json)
    | mutated(_MODEL).map(_with_model)
    | st.tuples(_PARTS, _PARTS).map(lambda parts: as_json(_SMALL | {"normalizer": parts[0], "pre_tokenizer": parts[1]}))
)
_LINES = st.lists(st.sampled_from(WORDS) | st.text(), max_size=6).map(
    lambda texts: "\n".join(texts).encode("utf-8", "surrogatepass")
)
_TEMPLATES = st.lists(_TEMPLATE_PIECES, max_size=12).map(lambda pieces: "".join(pieces).encode())
_GOOD_TEMPLATES = [template.encode() for template in (CHATML, THINKING, GENERATION, TOOLS)]
_GOOD_JSON = [
    as_json(ROWS_OF_ALL_KINDS),
    _jsonl(ROWS_OF_ALL_KINDS),
    b"\n".join(as_json([row]) for row in ROWS_OF_ALL_KINDS),  # `cat a.json b.json`
]
_GOOD_ARROW = [_arrow([row], framed=framed) for row in ROWS_OF_ALL_KINDS for framed in (True, False)]

ROWS = (
    Target("rows-jsonl", _reads("jsonl"), _SOME.map(_jsonl) | broken([_jsonl(ROWS_OF_ALL_KINDS)])),
    Target(
        "rows-json",
        _reads("json"),
        _SOME.map(as_json) | _SOME.map(lambda rows: as_json({"data": rows})) | broken(_GOOD_JSON),
    ),
    Target("rows-csv", _reads("csv"), _SOME.map(_csv) | broken([_csv(ROWS_OF_ALL_KINDS)])),
    Target("rows-txt", _reads("txt"), _LINES | st.binary()),
    Target("rows-gz", _reads("jsonl.gz"), broken([zlib.compress(_jsonl(ROWS_OF_ALL_KINDS), wbits=31)])),
    Target(
        "rows-parquet",
        _reads("parquet"),
        _SOME.map(_parquet) | broken([_parquet([row]) for row in ROWS_OF_ALL_KINDS]),
    ),
    Target("rows-arrow", _reads("arrow"), broken(_GOOD_ARROW)),
    Target("template", read_template, _TEMPLATES | broken(_GOOD_TEMPLATES)),
    Target("tokenizer", read_tokenizer, _TOKENIZERS),
)
