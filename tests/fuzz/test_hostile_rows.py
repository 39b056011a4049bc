"""Data that was made to do harm: links, packed files, offsets, lines without end, templates that are programs."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pyarrow
import pytest

from data.data_kit import assistant, byte_tokenizer, prepared, texts, user, write_jsonl
from fuzz.commands import ask, write_recipe
from fuzz.guard import bounded as guarded
from megatrain.data import bounded, documents, lines
from megatrain.data.files import locate
from megatrain.errors import DataError

TEXT = '{"text": "a b"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(TEXT)
    (tmp_path / "secret.txt").write_text("hunter2\n")
    return tmp_path / "data"


def test_a_link_out_of_a_folder_of_data_is_refused(folder: Path) -> None:
    (folder / "b.txt").symlink_to("../secret.txt")
    with pytest.raises(DataError, match=r"leads out of the folder, to .*secret\.txt") as caught:
        locate(str(folder))
    assert caught.value.where == str(folder / "b.txt")


def test_a_link_to_a_folder_is_refused_and_not_left_out(folder: Path) -> None:
    (folder / "more").symlink_to(folder.parent)
    with pytest.raises(DataError, match="leads out of the folder"):
        locate(str(folder))
    (folder / "more").unlink()
    (folder / "loop").symlink_to(".")
    with pytest.raises(DataError, match="is a link to a folder"):
        locate(str(folder))


def test_links_within_a_folder_and_in_the_hubs_cache_are_followed(folder: Path) -> None:
    (folder / "b.jsonl").symlink_to("a.jsonl")
    assert [path.name for path in locate(str(folder)).files] == ["a.jsonl", "b.jsonl"]
    snapshot = folder.parent / "repo" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (folder.parent / "repo" / "blobs").mkdir()
    (folder.parent / "repo" / "blobs" / "x").write_text(TEXT)
    (snapshot / "c.jsonl").symlink_to("../../blobs/x")
    assert [path.name for path in locate(str(snapshot)).files] == ["c.jsonl"]


def test_a_pattern_ends_where_links_do_not(folder: Path) -> None:
    """Two links to the folder that they lie in: 2**40 paths lead through them."""
    (folder / "one").symlink_to(".")
    (folder / "two").symlink_to(".")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "b.jsonl").write_text(TEXT)
    (folder / ".hidden.jsonl").write_text(TEXT)
    with guarded():
        for pattern in ("**/*.jsonl", "**", "**/**/*.jsonl"):
            assert [path.name for path in locate(f"{folder}/{pattern}").files] == ["a.jsonl", "b.jsonl"]
        assert [path.name for path in locate(f"{folder}/**/er/*").files] == ["b.jsonl"]
        with pytest.raises(DataError, match="no file matches"):
            locate(f"{folder}/**/*.csv")


@pytest.mark.parametrize("name", ["../secret.txt", "/etc/passwd", "..", 5, None, "absent.arrow"])
def test_a_saved_data_set_names_files_beside_it_only(folder: Path, name: object) -> None:
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="which is no"):
        locate(str(folder))


def test_a_split_is_a_folder_below(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["..", "train"]}))
    with pytest.raises(DataError, match="no split"):
        locate(str(folder), split="..")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_not_opened(folder: Path, kind: str) -> None:
    path = folder / "b.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"no such file or folder|leads out of the folder"):
        locate(str(path if kind == "pipe" else folder))


def test_names_that_no_file_has(folder: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be looked at|no such file"):
        locate("a" * 5000)


@pytest.mark.parametrize("suffix", ["jsonl", "txt", "csv", "json"])
def test_a_packed_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(lines, "_LONGEST_LINE", 100_000)
    path = tmp_path / f"bomb.{suffix}.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b"a" * 1_000_000))
    with pytest.raises(DataError, match=r"the line is longer than 97\.7 KiB") as caught:
        prepared(str(path))
    assert caught.value.where == f"{path}:1"


def test_a_document_that_unpacks_to_more_than_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_LARGEST_DOCUMENT", 100_000)
    monkeypatch.setattr(documents, "_PIECE", 10_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" + b'{"text": "a"},' * 100_000))
    with pytest.raises(DataError, match=r"more than 97\.7 KiB"):
        prepared(str(path))


def test_offsets_that_point_out_of_the_file_do_not_kill_the_process(tmp_path: Path) -> None:
    path = tmp_path / "r.arrow"
    table = pyarrow.table({"text": ["first", "second"]})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    whole = path.read_bytes()
    at = whole.index(b"\0\0\0\0\x05\0\0\0\x0b\0\0\0") + 8
    path.write_bytes(whole[:at] + (2**31 - 1).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(DataError, match="cannot be read as arrow"):
        prepared(str(path))


def test_a_hopeless_source_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["megatrain.data.prepare"], "_HOPELESS", 50)
    path = write_jsonl(tmp_path / "r.jsonl", [{"x": 1}] * 500)
    with pytest.raises(DataError, match="0 usable of 50 rows"):
        prepared(path, bad_rows="skip")


def test_what_a_row_says_is_told_in_short(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "r" * 100_000, "content": "a"}]}, {f"c{i}" * 100: 1 for i in range(5000)}]
    for row in rows:
        with pytest.raises(DataError) as caught:
            prepared(write_jsonl(tmp_path / "r.jsonl", [row]))
        assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("depth", [100, 200_000])
@pytest.mark.parametrize("column", ["messages", "tools"])
def test_json_within_json(tmp_path: Path, depth: int, column: str) -> None:
    row = {"messages": [user("q"), assistant("a")]} | {column: "[" * depth}
    with pytest.raises(DataError, match=r"not JSON|nested too deeply"):
        prepared(write_jsonl(tmp_path / "r.jsonl", [row]))


def test_escape_codes_of_a_row_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatrain.cli.main import main

    path = write_jsonl(tmp_path / "r.jsonl", [{"text": "a\x1b]0;owned\x07 \x9b31m b\nc"}])
    with pytest.raises(SystemExit):
        main(["data", write_recipe(tmp_path, train=path)])
    out = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07" in out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_a_file_whose_name_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"r\xff\x1b[31m.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text('{"x": 1}\n')
    answer = ask(capsys, "data", write_recipe(tmp_path, train=str(tmp_path / "data")))
    assert (answer.code, "0 usable of 1 rows" in answer.message) == (2, True)


# Chat templates -------------------------------------------------------------------------------------------------

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
ESCAPES = {
    "attribute walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format string": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "globals": "{{ raise_exception.__globals__['os'].system('touch owned') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}",
    "changing the rows": "{{ messages.append(1) }}",
    "a range of a billion": "{% for i in range(10**9) %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "break": LOOP + "{% break %}",
}


@pytest.mark.parametrize("attack", ESCAPES)
def test_a_template_stays_in_its_sandbox(tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_jsonl(tmp_path / "r.jsonl", [{"messages": [user("q"), assistant("a")]}])
    with guarded(), pytest.raises(DataError, match="chat template") as caught:
        prepared(path, tokenizer=byte_tokenizer(template=ESCAPES[attack] + LOOP))
    assert "root:" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "attack",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.setattr(bounded, "CPU_S", 0.5)
    path = write_jsonl(tmp_path / "r.jsonl", [{"messages": [user("q"), assistant("a")]}])
    with pytest.raises(DataError, match=r"the chat template ran for more than 0\.5 s on one row") as caught:
        prepared(path, tokenizer=byte_tokenizer(template=attack + LOOP), bad_rows="skip")
    assert caught.value.where == "tokenizer.chat_template"


@pytest.mark.parametrize(
    "attack",
    ["{{ 'a' * 10**11 }}", "{{ '%100000000000d' % 1 }}", "{% set x = namespace(s='aaaaaaaa') %}"
     "{% for i in range(40) %}{% set x.s = x.s + x.s %}{% endfor %}"],
)  # fmt: skip
def test_a_template_that_asks_for_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str) -> None:
    monkeypatch.setattr(bounded, "EXTRA_BYTES", 1 << 28)
    path = write_jsonl(tmp_path / "r.jsonl", [{"messages": [user("q"), assistant("a")]}])
    with pytest.raises(DataError, match="the chat template asked for more than 256 MiB of memory"):
        prepared(path, tokenizer=byte_tokenizer(template=attack + LOOP), bad_rows="skip")


def test_the_limits_are_gone_after_a_template(tmp_path: Path) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    path = write_jsonl(tmp_path / "r.jsonl", [{"messages": [user("q"), assistant("a")]}])
    assert texts(prepared(path).train)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["template.jinja", "pipe"])
def test_a_template_that_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    recipe = write_recipe(tmp_path, tokenizer={"chat_template": str(tmp_path / name)})
    answer = ask(capsys, "data", recipe)
    assert (answer.code, "tokenizer.chat_template" in answer.message) == (2, True)
