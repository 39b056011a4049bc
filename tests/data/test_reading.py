"""Files to records: nothing split, guessed, or lost on the way, and every fault with its line and row."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from data_kit import prepared, texts, write_jsonl
from pyarrow import ipc, parquet

from megatrain.data.files import KINDS, locate, read
from megatrain.data.records import Record
from megatrain.errors import DataError

LINE_BREAKS = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\r\nh\ri"


def records(path: object, *, split: str = "train", wanted: frozenset[str] = frozenset({"text", "n"})) -> list[Record]:
    return list(read(locate(str(path), split=split), subset=None, split=split, wanted=wanted))


def values(path: object, **more: object) -> list[object]:
    return [record.columns.get("text") for record in records(path, **more)]  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path, ending: str, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    rows = [{"text": LINE_BREAKS}, {"text": "zwei"}, {"text": LINE_BREAKS + "!"}]
    path.write_bytes(ending.join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert values(path) == [row["text"] for row in rows]
    assert [record.line for record in records(path)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.csv", "r.txt"])
def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path, name: str) -> None:
    content = {"r.jsonl": '{"text": "x"}\n', "r.json": '[{"text": "x"}]', "r.csv": "text\nx\n", "r.txt": "x\n"}[name]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert values(tmp_path / name) == ["x"]


def test_blank_lines_are_no_records_but_lines(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('\n{"text": "a"}\n  \n\n{"text": "b"}')
    assert [(r.row, r.line) for r in records(tmp_path / "r.jsonl")] == [(1, 2), (2, 5)]


def test_a_broken_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"\n[1]\nnull\n{"text": "\xff"}\n{"text": "c"}\n')
    found = records(tmp_path / "r.jsonl")
    assert [r.columns.get("text") for r in found] == ["a", None, None, None, None, "c"]
    faults = [str(r.fault) for r in found]
    assert faults[1].startswith("broken JSON: Expecting ',' delimiter at column")
    assert faults[2:5] == [
        "is a list, not an object with columns",
        "is null, not an object with columns",
        "byte 11 of the line is not UTF-8",
    ]


def test_json_beyond_pythons_limits_is_a_fault_of_its_row(tmp_path: Path) -> None:
    rows = ['{"text": ' + "9" * 5000 + "}", '{"text": ' + "[" * 100_000 + "}", '{"text": "a"}']
    (tmp_path / "r.jsonl").write_text("\n".join(rows))
    assert [r.fault for r in records(tmp_path / "r.jsonl")] == [
        "broken JSON: a number has too many digits",
        "broken JSON: nested too deeply",
        None,
    ]


def test_a_very_long_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with path.open("w") as file:
        file.write('{"text": "')
        for _ in range(200):
            file.write("0123456789abcdef" * 65_536)  # 1 MiB
        file.write('"}\n{"text": "next"}\n')
    first, second = values(path)
    assert (len(str(first)), second) == (200 * 2**20, "next")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ('[{"text": "a"}, {"text": "b"}]', [1, 1]),
        ('[\n {"text": "a"},\n\n {"text":\n "b"}\n]\n', [2, 4]),
        ('{"text": "a"}\n{"text": "b"}\n', [1, 2]),
        ('{\n "text": "a"\n}\n{\n "text": "b"\n}\n', [1, 4]),
        ('{"version": 1,\n "data": [{"text": "a"}, {"text": "b"}]}', [1, 1]),
        ('{"data": [{"text": "a"}, {"text": "b"}]}\n', [1, 1]),
        ('[{"text": "a"}]\n[{"text": "b"}]\n', [1, 2]),
        ('[{"text": "a"}][{"text": "b"}]', [1, 1]),
        ('[\n {\n  "text": "a"\n }\n]\n[\n {\n  "text": "b"\n }\n]\n', [2, 7]),
        ('[{"text": "a"}] {"text": "b"}', [1, 1]),
        ('{\n "text": "a"\n}\n[{"text": "b"}]', [1, 4]),
        ('[]\n[{"text": "a"}, {"text": "b"}]', [2, 2]),
    ],
)
def test_every_usual_form_of_json(tmp_path: Path, content: str, lines: list[int]) -> None:
    (tmp_path / "r.json").write_text(content)
    found = records(tmp_path / "r.json")
    assert [r.columns["text"] for r in found] == ["a", "b"]
    assert [r.row for r in found] == [1, 2]
    assert [r.line for r in found] == lines


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("column", ["messages", "conversation", "chat"])
def test_one_row_of_messages_is_no_list_of_rows(tmp_path: Path, indent: int | None, column: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps({column: [{"role": "user", "content": "q"}]}, indent=indent))
    assert [list(r.columns) for r in records(tmp_path / "r.json")] == [[column]]


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        ('[{"text": "a"},\n {"text" "b"}]', ":2", "':' delimiter at column 10"),
        ('[{"text": "a"}\n {"text": "b"}]', ":2", r"expected ',' or '\]'"),
        ('[{"text": "a"},', ":1", "the list is not closed"),
        ('[{"text": "a"}] x', ":1", "neither a list nor an object follows the end of the one before at column 17"),
        ('[{"text": "a"}]\n]', ":2", "neither a list nor an object follows"),
        ('[{"text": "a"}]\n,[{"text": "b"}]', ":2", "neither a list nor an object follows"),
        ('{\n "text": "a"\n}\n5', ":4", "neither a list nor an object follows"),
        ('[{"text": "a"}]\n[{"text": "b"}', ":2", r"expected ',' or '\]'"),
        ('[{"text": "a"}]\n{"text": ', ":2", "Expecting value at column 10"),
    ],
)
def test_a_broken_json_document_says_where(tmp_path: Path, content: str, where: str, what: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(DataError, match=what) as caught:
        records(tmp_path / "r.json")
    assert str(caught.value.where).endswith("r.json" + where)


def test_csv_fields_are_text_whatever_the_first_rows_look_like(tmp_path: Path) -> None:
    rows = [["1", "1"]] * 3000 + [["one, two\nthree", 'say "x"'], ["a\u2028b", ""]]
    with (tmp_path / "r.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "n"], *rows])
    found = records(tmp_path / "r.csv")
    assert [[r.columns["text"], r.columns["n"]] for r in found] == rows
    assert (found[-1].row, found[-1].line) == (3002, 3004)


def test_a_csv_row_of_another_width_is_a_fault_of_that_row(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("text,n\na,1\nb\nc,1,2\nd,4\n")
    assert [r.fault for r in records(tmp_path / "r.csv")] == [
        None,
        "has 1 fields, the header has 2",
        "has 3 fields, the header has 2",
        None,
    ]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_that_is_not_utf_8_is_found_in_its_line(tmp_path: Path, ending: str) -> None:
    lines = ["text,n", *(f"zeile {n} \u00fc,{n}" for n in range(2, 1001))]
    data = [line.encode() for line in lines]
    data[400] = "é ü,".encode() + b"\xfc\xfc"
    (tmp_path / "r.csv").write_bytes(ending.encode().join(data))
    with pytest.raises(DataError, match="byte 7 of the line is not UTF-8") as caught:
        records(tmp_path / "r.csv")
    assert caught.value.where == f"{tmp_path / 'r.csv'}:401"


@pytest.mark.parametrize("name", ["r.csv", "r.tsv"])
def test_a_header_with_a_column_twice_is_refused(tmp_path: Path, name: str) -> None:
    between = "," if name == "r.csv" else "\t"
    (tmp_path / name).write_text("\n".join(between.join(row) for row in (["text", "n", "text"], ["a", "1", "b"])))
    with pytest.raises(DataError, match="the header has 'text' twice") as caught:
        records(tmp_path / name)
    assert caught.value.where == f"{tmp_path / name}:1"
    (tmp_path / name).write_text("\n".join(between.join(row) for row in (["text", "", ""], ["a", "", ""])))
    assert values(tmp_path / name) == ["a"]  # as spreadsheets write empty columns


def test_tsv_and_packed_files(tmp_path: Path) -> None:
    (tmp_path / "r.tsv").write_text("n\ttext\n1\ta,b\n")
    (tmp_path / "r.jsonl.gz").write_bytes(gzip.compress(b'{"text": "z"}\n'))
    assert values(tmp_path / "r.tsv") == ["a,b"]
    assert values(tmp_path / "r.jsonl.gz") == ["z"]


@pytest.mark.parametrize("name", ["r.jsonl", "r.json", "r.csv", "r.txt"])
@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (gzip.compress(b'{"text": "a"}\n'), "packed with gzip", "end in .gz"),
        ('{"text": "a"}\n'.encode("utf-16"), "UTF-16", "iconv"),
        ('{"text": "a"}\n'.encode("utf-16-le"), "UTF-16", "iconv"),
        ('{"text": "a"}\n'.encode("utf-16-be"), "UTF-16", "iconv"),
        (b"PK\x03\x04\x14\0\0\0", "a zip archive", "unpack it"),
    ],
    ids=["gzip", "utf-16", "utf-16-le", "utf-16-be", "zip"],  # gzip's header holds the time: workers would disagree
)
def test_a_file_that_is_no_text_is_told_as_what_it_is(
    tmp_path: Path, name: str, content: bytes, what: str, hint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"is {what}") as caught:
        records(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.json.gz", "r.csv.gz", "r.txt.gz"])
@pytest.mark.parametrize("damage", ["cut off", "flipped", "not packed"])
def test_a_damaged_packed_file_is_our_error(tmp_path: Path, name: str, damage: str) -> None:
    packed = bytearray(gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(20_000))))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    data = {"cut off": packed[:-20], "flipped": packed, "not packed": b"{}"}[damage]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=r"cannot be read|broken CSV|not UTF-8") as caught:
        records(tmp_path / name)
    assert name in str(caught.value.where)


@pytest.mark.parametrize("kind", ["parquet", "arrow file", "arrow stream"])
def test_tables(tmp_path: Path, kind: str) -> None:
    count = 3000
    # A value of the unused column is no possible date: whoever converts it fails.
    when = pa.array([2**62] * count, pa.int64()).cast(pa.timestamp("us"))
    table = pa.table({"text": [f"row {i}" for i in range(count)], "when": when})
    path = tmp_path / ("r.parquet" if kind == "parquet" else "r.arrow")
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=700)
    else:
        make = ipc.new_file if kind == "arrow file" else ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    found = records(path)
    assert [r.columns for r in found] == [{"text": f"row {i}"} for i in range(count)]
    assert [r.row for r in found] == list(range(1, count + 1))


@pytest.mark.parametrize("name", ["r.parquet", "r.arrow"])
def test_a_damaged_table_is_our_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a table at all")
    with pytest.raises(DataError, match="cannot be read as"):
        records(tmp_path / name)


@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"splits": 5, "_data_files": 5}'])
def test_a_damaged_saved_data_set_is_our_error(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match="is not what `datasets` writes"):
        records(tmp_path)


def test_each_line_of_a_txt_file_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_bytes("eins \u2028 x\r\n\n zwei\ndrei".encode())
    assert values(tmp_path / "r.txt") == ["eins \u2028 x", " zwei", "drei"]


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.jsonl", "a.jsonl", ".hidden.jsonl", "notes.md"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert values(tmp_path) == ["a.jsonl", "b/2.jsonl"]


def test_a_split_chooses_among_the_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl", "constrained.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert values(tmp_path) == ["train-0.jsonl", "train-1.jsonl"]
    assert values(tmp_path, split="test") == ["test.jsonl"]
    with pytest.raises(DataError, match="has no split 'validation'") as caught:
        records(tmp_path, split="validation")
    assert caught.value.hint == "it has: test, train"


def test_a_glob(tmp_path: Path) -> None:
    for name in ("b1.jsonl", "b2.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert values(tmp_path / "b*.jsonl") == ["b1.jsonl", "b2.jsonl"]
    with pytest.raises(DataError, match="no file matches"):
        records(tmp_path / "c*.jsonl")


def test_what_datasets_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    rows = {"text": [f"t{i}" for i in range(10)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "dict")
    assert values(tmp_path / "one") == rows["text"]
    assert values(tmp_path / "dict") == rows["text"]
    with pytest.raises(DataError, match="has no split 'test'"):
        records(tmp_path / "dict", split="test")


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/nowhere/at/all", "no where"])
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        locate(name, split="train")


def test_a_kind_that_is_not_understood(tmp_path: Path) -> None:
    (tmp_path / "r.docx").write_text("x")
    with pytest.raises(DataError, match=r"not understood: \.docx") as caught:
        locate(str(tmp_path / "r.docx"), split="train")
    assert all(kind in str(caught.value.hint) for kind in KINDS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data files"):
        locate(str(tmp_path / "empty"), split="train")


def test_a_hub_id_that_cannot_be_had_is_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(path: str, **_: object) -> None:
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (offline)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match=r"cannot be had: Couldn't reach 'org/name' on the Hub \(offline\)\nhint"
    ) as caught:
        records("org/name")
    assert caught.value.exit_code == 2
    assert "network" in str(caught.value.hint)


def test_a_hub_data_set_is_read_by_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[object] = []

    def load(path: str, *, name: str | None, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_dict({"text": ["a", "b"], "other": [1, None]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    place = locate("org/name", split="test")
    found = list(read(place, subset="small", split="test", wanted=frozenset({"text"})))
    assert asked == [("org/name", "small", "test")]
    assert [(r.file, r.row, r.columns) for r in found] == [
        ("org/name", 1, {"text": "a"}),
        ("org/name", 2, {"text": "b"}),
    ]


def test_later_rows_may_look_otherwise(tmp_path: Path) -> None:
    rows = [{"text": "a", "x": 1}, {"text": "b", "x": "one"}, {"x": {"y": [None]}, "text": "c", "z": 2.5}, {"text": 7}]
    data = prepared(write_jsonl(tmp_path / "r.jsonl", rows))
    assert texts(data.train) == ["a</s>", "b</s>", "c</s>", "7</s>"]
