"""From a recipe to samples: every row is used, or refused with its number and the reason."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_kit import KJV, assistant, byte_tokenizer, prepared, recipe, system, texts, trained, user, write_jsonl

from megatrain.data import Loader, load_tokenizer, prepare
from megatrain.errors import DataError
from megatrain.recipe import resolve_asset


def chat(question: str, answer: object) -> dict[str, object]:
    return {"messages": [user(question), assistant(answer)]}


def plain(*rows: str) -> list[dict[str, object]]:
    return [{"text": row} for row in rows]


def test_the_quickstart_data_with_its_real_tokenizer() -> None:
    wanted = recipe("megatrain:devil.jsonl", eval_fraction=0.1)
    tokenizer = load_tokenizer(wanted)
    data = prepare(wanted, tokenizer=tokenizer, max_positions=256, vocab_size=None)
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (868, 96)
    account = data.report.sources[0]
    assert (account.format, account.read, account.used, account.truncated.count) == ("alpaca", 964, 964, 88)
    first = data.train[0]
    assert trained(tokenizer, first)[0].startswith("A decent and customary mental attitude")
    assert trained(tokenizer, first)[0].endswith("<|im_end|>")
    cut = account.truncated.first[0]
    assert (cut.row, cut.line, cut.reason) == (78, 78, "431 tokens, max_seq_len is 256")


class TestTexts:
    def test_exactly_one_eos_at_the_end(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", plain("abc", "abc</s>", "abc</s></s>"))
        assert texts(prepared(path).train) == ["abc</s>"] * 3

    def test_exactly_one_bos_at_the_front(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer(adds_bos=True)
        path = write_jsonl(tmp_path / "r.jsonl", plain("abc", "<s>abc", "<s><s>abc"))
        data = prepared(path, tokenizer=tokenizer)
        assert texts(data.train) == ["<s>abc</s>"] * 3
        assert trained(tokenizer, data.train[0]) == ["abc</s>"]

    def test_a_prompt_gets_one_bos_and_its_completion_one_eos(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer(adds_bos=True)
        rows = [{"prompt": "q", "completion": "a"}, {"prompt": "<s>q", "completion": "a</s>"}]
        data = prepared(write_jsonl(tmp_path / "r.jsonl", rows), tokenizer=tokenizer)
        assert texts(data.train) == ["<s>qa</s>"] * 2
        assert [trained(tokenizer, sample) for sample in data.train] == [["a</s>"]] * 2
        whole = prepared(str(tmp_path / "r.jsonl"), tokenizer=tokenizer, train_on="all")
        assert trained(tokenizer, whole.train[0]) == ["qa</s>"]

    @pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
    def test_split_keeps_every_token_and_never_leaves_the_eos_alone(self, tmp_path: Path, length: int) -> None:
        text = "abcdefghijklmnopqrst"[:length]
        data = prepared(write_jsonl(tmp_path / "r.jsonl", plain(text)), max_seq_len=8)
        assert "".join(texts(data.train)) == text + "</s>"
        assert 2 <= data.train.lengths.min() <= data.train.lengths.max() <= 8
        assert [sample.supervised[0] for sample in data.train] == [False] * len(data.train)
        assert all(sample.supervised[1:].all() for sample in data.train)
        assert data.report.sources[0].split.count == (length + 1 > 8)
        assert data.report.sources[0].tokens == length + 1

    @pytest.mark.parametrize("length", [7, 8, 20])
    def test_a_truncated_text_ends_with_its_one_eos(self, tmp_path: Path, length: int) -> None:
        text = "abcdefghijklmnopqrst"[:length]
        data = prepared(write_jsonl(tmp_path / "r.jsonl", plain(text)), max_seq_len=8, long_rows="truncate")
        assert texts(data.train) == ["abcdefg</s>"]
        assert data.train[0].supervised.tolist() == [False] + [True] * 7

    def test_a_tokenizer_without_eos_is_refused(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(DataError, match="no EOS token"):
            prepared(write_jsonl(tmp_path / "r.jsonl", plain("abc")), tokenizer=tokenizer)

    def test_lengths_saved_with_the_tokenizer_cut_nothing(self, tmp_path: Path) -> None:
        byte_tokenizer().save_pretrained(tmp_path / "tok")
        saved = (tmp_path / "tok" / "tokenizer.json").read_text()
        cutting = '{"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}'
        assert '"truncation": null' in saved
        (tmp_path / "tok" / "tokenizer.json").write_text(
            saved.replace('"truncation": null', f'"truncation": {cutting}')
        )
        path = write_jsonl(tmp_path / "r.jsonl", plain("abcdefgh"))
        wanted = recipe(path, sections={"tokenizer": {"path": str(tmp_path / "tok")}})
        data = prepare(wanted, tokenizer=load_tokenizer(wanted), max_positions=None, vocab_size=None)
        assert texts(data.train) == ["abcdefgh</s>"]


class TestBadRows:
    ROWS = (chat("q", "a"), chat("q", None), {"messages": [user("q")]}, chat("r", "b"))

    def test_skip_counts_them_with_rows_lines_and_reasons(self, tmp_path: Path) -> None:
        path = tmp_path / "r.jsonl"
        write_jsonl(path, self.ROWS)
        path.write_text("\n" + path.read_text() + "{broken\n")
        data = prepared(str(path), bad_rows="skip")
        account = data.report.sources[0]
        assert (account.read, account.used, account.refused.count) == (5, 2, 3)
        assert [(r.row, r.line, r.reason) for r in account.refused.first] == [
            (2, 3, "the content of message 2 (assistant) is null"),
            (3, 4, "no message of the assistant"),
            (5, 6, "broken JSON: Expecting property name enclosed in double quotes at column 2"),
        ]
        assert [sample.row for sample in data.train] == [1, 4]
        assert "None" not in "".join(texts(data.train))

    def test_error_names_them_all(self, tmp_path: Path) -> None:
        with pytest.raises(DataError) as caught:
            prepared(write_jsonl(tmp_path / "r.jsonl", self.ROWS))
        assert caught.value.exit_code == 2
        assert caught.value.message.startswith("2 rows of the first 4 cannot be used\n")
        assert "r.jsonl:2: row 2: the content of message 2 (assistant) is null" in caught.value.message
        assert "r.jsonl:3: row 3: no message of the assistant" in caught.value.message
        assert "bad_rows: skip" in str(caught.value.hint)

    def test_error_does_not_read_a_hopeless_file_to_its_end(self, tmp_path: Path) -> None:
        rows = [chat("q", "a")] * 300 + [chat("q", None)] * 5000
        with pytest.raises(DataError, match="10 rows of the first 310 cannot be used"):
            prepared(write_jsonl(tmp_path / "r.jsonl", rows))

    @pytest.mark.parametrize("bad_rows", ["error", "skip"])
    def test_no_usable_row_is_an_error_with_the_first_reason(self, tmp_path: Path, bad_rows: str) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", [chat("q", None)] * 30)
        with pytest.raises(DataError, match=r"0 usable of 30 rows; the first: .*row 1: the content of message 2"):
            prepared(path, bad_rows=bad_rows)

    def test_columns_that_nobody_knows_lead_to_the_renames(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", [{"question": "q", "answer": "a"}])
        with pytest.raises(DataError, match=r"no format fits its columns \(question, answer\)") as caught:
            prepared(path)
        assert "columns: {prompt: question, completion: answer}" in str(caught.value.hint)

    @pytest.mark.parametrize(
        ("name", "content", "hint"),
        [
            ("r.jsonl", '{"text": "a"\n{"text": \n', "mend the file"),
            ("r.csv", "text,n\na\nb\n", "mend the file"),
            ("r.jsonl", b'{"text": "\xff"}\n', "mend the file"),
            ("r.jsonl", '{"text": null}\n{"text": null}\n', "mend the rows"),
            ("r.jsonl", '{broken\n{"title": "a"}\n{"title": "b"}\n', "say which columns are meant"),
            ("r.jsonl", '{"title": "a"}\n{broken\n{"text"\n', "mend the file"),
        ],
    )
    def test_what_to_do_follows_from_the_most_frequent_reason(
        self, tmp_path: Path, name: str, content: str | bytes, hint: str
    ) -> None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(DataError, match="0 usable of") as caught:
            prepared(str(tmp_path / name))
        assert str(caught.value.hint).startswith(hint)

    def test_one_useless_source_among_several_is_an_error_too(self, tmp_path: Path) -> None:
        good = write_jsonl(tmp_path / "good.jsonl", [chat("q", "a")])
        bad = write_jsonl(tmp_path / "bad.jsonl", [{"title": "t"}])
        with pytest.raises(DataError, match=r"0 usable of 1 rows.*no format fits its columns \(title\)"):
            prepared([good, bad], bad_rows="skip")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="0 usable of 0 rows") as caught:
            prepared(write_jsonl(tmp_path / "r.jsonl", []))
        assert caught.value.hint == "the source holds no rows"

    def test_half_a_surrogate_pair_is_no_crash(self, tmp_path: Path) -> None:
        (tmp_path / "r.jsonl").write_text('{"text": "a \\ud83d b"}\n{"text": "ok \\ud83d\\ude00"}\n')
        data = prepared(str(tmp_path / "r.jsonl"), bad_rows="skip")
        assert texts(data.train) == ["ok 😀</s>"]
        assert "surrogate" in data.report.sources[0].refused.first[0].reason

    def test_a_role_that_nobody_knows_is_named(self, tmp_path: Path) -> None:
        rows = [{"messages": [user("q"), {"role": "narrator", "content": "x"}, assistant("a")]}]
        with pytest.raises(DataError, match="message 2 has the unknown role 'narrator'"):
            prepared(write_jsonl(tmp_path / "r.jsonl", rows))


def test_files_of_a_folder_that_are_left_out_are_told(tmp_path: Path) -> None:
    for name in ("b.jsonl", "train.txt", "a.csv", "test.jsonl"):
        (tmp_path / name).write_text({".csv": "text\na\n", ".txt": "a\n"}.get(Path(name).suffix, '{"text": "a"}\n'))
    report = prepared(str(tmp_path)).report
    assert report.sources[0].read == 1
    assert report.to_dict()["sources"][0]["files_left_out"] == [str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl")]
    assert report.warnings() == [
        f"{tmp_path}: 2 files are not read, as names of others announce a split (train, ...) and theirs none: "
        f"{tmp_path / 'a.csv'}, {tmp_path / 'b.jsonl'}"
    ]
    for name in ("train.txt", "test.jsonl"):
        (tmp_path / name).unlink()
    assert prepared(str(tmp_path)).report.warnings() == []


class TestLongRows:
    def test_an_answer_that_is_cut_off_is_refused_with_its_row(self, tmp_path: Path) -> None:
        rows = [chat("q", "a"), chat("q" * 300, "a")]
        path = write_jsonl(tmp_path / "r.jsonl", rows)
        with pytest.raises(DataError, match=r"r\.jsonl:2: row 2: no supervised token is left of it \(\d+ tokens"):
            prepared(path)
        data = prepared(path, bad_rows="skip")
        assert (len(data.train), data.report.sources[0].refused.count) == (1, 1)
        assert all(sample.supervised.any() for sample in data.train)

    def test_a_cut_answer_keeps_what_is_left_and_no_false_end(self, tmp_path: Path) -> None:
        data = prepared(write_jsonl(tmp_path / "r.jsonl", [chat("q", "a" * 500)]), max_seq_len=64)
        sample = data.train[0]
        assert len(sample.tokens) == 64
        assert set("".join(trained(byte_tokenizer(), sample))) == {"a"}
        assert data.report.sources[0].truncated.count == 1

    def test_skip_and_error(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", [chat("q", "a"), chat("q", "a" * 500)])
        account = prepared(path, long_rows="skip").report.sources[0]
        assert (account.read, account.used, account.long.count, account.refused.count) == (2, 1, 1, 0)
        with pytest.raises(DataError, match="max_seq_len is 256") as caught:
            prepared(path, long_rows="error")
        assert str(caught.value.where).endswith("r.jsonl:2: row 2")

    def test_split_drops_pieces_that_nothing_can_be_learnt_from(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", [chat("q" * 200, "a" * 100)])
        data = prepared(path, max_seq_len=64, long_rows="split")
        assert all(sample.supervised.any() for sample in data.train)
        assert "".join("".join(trained(byte_tokenizer(), s)) for s in data.train).count("a") in (98, 99, 100)

    def test_beyond_the_positions_of_the_model(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", plain("abc"))
        with pytest.raises(DataError, match="256 is beyond the 128 positions") as caught:
            prepared(path, max_positions=128)
        assert caught.value.where == "data.max_seq_len"
        assert prepared(path, max_positions=256).train.token_count == 4
        scaled = {"model": {"path": "m", "config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}}
        wanted = recipe(path, sections=scaled)
        assert prepare(wanted, tokenizer=byte_tokenizer(), max_positions=128, vocab_size=None).train.token_count == 4


class TestSources:
    def test_limit_and_several_files(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "a.jsonl", plain("a1", "a2", "a3"))
        write_jsonl(tmp_path / "b.jsonl", plain("b1", "b2"))
        both = {"path": str(tmp_path / "*.jsonl"), "limit": 4}
        data = prepared([both, str(tmp_path / "b.jsonl")])
        assert texts(data.train) == ["a1</s>", "a2</s>", "a3</s>", "b1</s>", "b1</s>", "b2</s>"]
        assert data.train.source.tolist() == [0, 0, 0, 0, 1, 1]
        assert [(Path(s.file).name, s.row) for s in data.train][3:5] == [("b.jsonl", 1), ("b.jsonl", 1)]

    def test_each_source_has_its_format(self, tmp_path: Path) -> None:
        a = write_jsonl(tmp_path / "a.jsonl", plain("t"))
        b = write_jsonl(tmp_path / "b.jsonl", [chat("q", "a")])
        c = {
            "path": write_jsonl(tmp_path / "c.jsonl", [{"q": "1", "a": "2"}]),
            "columns": {"prompt": "q", "completion": "a"},
        }
        assert [s.format for s in prepared([a, b, c]).report.sources] == ["text", "messages", "prompt_completion"]

    def test_conversations_without_a_template(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", [chat("q", "a")])
        with pytest.raises(DataError, match="the tokenizer has no chat template") as caught:
            prepared(path, tokenizer=byte_tokenizer(template=None))
        assert caught.value.where == "tokenizer.chat_template"
        assert texts(
            prepared(write_jsonl(tmp_path / "t.jsonl", plain("t")), tokenizer=byte_tokenizer(template=None)).train
        )

    def test_the_recipes_template_and_system_turn(self, tmp_path: Path) -> None:
        path = write_jsonl(
            tmp_path / "r.jsonl", [chat("q", "a"), {"messages": [system("own"), *chat("r", "b")["messages"]]}]
        )  # type: ignore[misc]
        template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        (tmp_path / "t.jinja").write_text(template)
        byte_tokenizer().save_pretrained(tmp_path / "tok")
        for given in (template, str(tmp_path / "t.jinja")):
            section = {"tokenizer": {"path": str(tmp_path / "tok"), "chat_template": given}}
            wanted = recipe(path, sections=section, system="be kind")
            data = prepare(wanted, tokenizer=load_tokenizer(wanted), max_positions=None, vocab_size=None)
            assert texts(data.train) == [
                "[system]be kind</s>[user]q</s>[assistant]a</s>",
                "[system]own</s>[user]r</s>[assistant]b</s>",
            ]

    def test_a_broken_template_is_an_error_and_not_a_bad_row(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", [chat("q", "a")])
        tokenizer = byte_tokenizer(template="{{ eos_token }}\n{% for m in messages %}")
        with pytest.raises(DataError, match="the chat template is broken in line 2: ") as caught:
            prepared(path, tokenizer=tokenizer, bad_rows="skip")
        assert caught.value.where == "tokenizer.chat_template"

    def test_a_file_has_neither_splits_nor_subsets(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", plain("a"))
        with pytest.raises(DataError, match="a file has no split 'test'"):
            prepared({"path": path, "split": "test"})
        with pytest.raises(DataError, match="only data sets of the hub have subsets"):
            prepared({"path": path, "subset": "small"})

    def test_tokens_beyond_the_models_vocabulary(self, tmp_path: Path) -> None:
        wanted = recipe(write_jsonl(tmp_path / "r.jsonl", plain("a")))
        tokenizer = byte_tokenizer()
        assert prepare(wanted, tokenizer=tokenizer, max_positions=None, vocab_size=258).train.token_count == 2
        with pytest.raises(DataError, match="the tokenizer makes token 257, the model knows 257"):
            prepare(wanted, tokenizer=tokenizer, max_positions=None, vocab_size=257)

    @pytest.mark.parametrize("packing", [True, False])
    def test_the_tokenizers_padding_side_moves_nothing(self, tmp_path: Path, packing: bool) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", plain("a", "bcd", "ef"))
        batches = []
        for side in ("right", "left"):
            tokenizer = byte_tokenizer()
            tokenizer.padding_side = side
            samples = prepared(path, tokenizer=tokenizer, max_seq_len=16).train
            loader = Loader(samples, batch_size=3, max_seq_len=16, packing=packing, shuffle=False, seed=0)
            batches.append(loader.step_batch(0, 0).micro_batches(3)[0])
        assert torch.equal(batches[0].input_ids, batches[1].input_ids)
        assert torch.equal(batches[0].labels, batches[1].labels)
        assert batches[1].attention_mask is not None
        assert batches[1].attention_mask[:, 0].all(), "padding is on the right"

    def test_unprinted_tools_are_counted(self, tmp_path: Path) -> None:
        rows = [chat("q", "a") | {"tools": '[{"name": "f"}]'}, chat("q", "a") | {"tools": "[]"}]
        account = prepared(write_jsonl(tmp_path / "r.jsonl", rows)).report.sources[0]
        assert (account.used, account.tools_unprinted.count) == (2, 1)


class TestHeldOut:
    def test_a_share_of_the_rows_by_the_seed(self, tmp_path: Path) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", plain(*(f"row {i} " + "x" * (i % 40) for i in range(200))))
        first = prepared(path, eval_fraction=0.1, max_seq_len=16)
        assert first.eval is not None
        held, kept = ({s.row for s in samples} for samples in (first.eval, first.train))
        assert (len(held), len(held | kept), held & kept) == (20, 200, set())
        again = prepared(path, eval_fraction=0.1, max_seq_len=16)
        assert again.fingerprint() == first.fingerprint()
        seeded = recipe(path, sections={"train": {"seed": 1}}, eval_fraction=0.1, max_seq_len=16)
        other = prepare(seeded, tokenizer=byte_tokenizer(), max_positions=None, vocab_size=None)
        assert other.eval is not None
        assert {s.row for s in other.eval} != held

    @pytest.mark.parametrize(("rows", "fraction", "held"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2)])
    def test_at_least_one_and_never_all(self, tmp_path: Path, rows: int, fraction: float, held: int) -> None:
        path = write_jsonl(tmp_path / "r.jsonl", plain(*(f"row {i}" for i in range(rows))))
        data = prepared(path, eval_fraction=fraction)
        assert data.eval is not None
        assert (len(data.eval), len(data.train)) == (held, rows - held)

    def test_one_row_cannot_be_shared(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="one row is too few"):
            prepared(write_jsonl(tmp_path / "r.jsonl", plain("a")), eval_fraction=0.5)

    def test_eval_files_are_accounted_for_like_train(self, tmp_path: Path) -> None:
        train = write_jsonl(tmp_path / "t.jsonl", [chat("q", "a")])
        held = write_jsonl(tmp_path / "e.jsonl", [chat("q", "a"), chat("q" * 300, "cut off"), chat("r", "b")])
        data = prepared(train, eval=held, bad_rows="skip")
        assert data.eval is not None
        assert [sample.row for sample in data.eval] == [1, 3]
        assert [(s.role, s.used, s.refused.count) for s in data.report.sources] == [("train", 1, 0), ("eval", 2, 1)]
        with pytest.raises(DataError, match="row 2: no supervised token is left"):
            prepared(train, eval=held)


def test_preparing_can_be_interrupted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", plain(*["some text"] * 5000))
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(recipe(path), tokenizer=byte_tokenizer(), max_positions=None, vocab_size=None, should_stop=stop)


def test_the_fingerprint_knows_every_change(tmp_path: Path) -> None:
    base = write_jsonl(tmp_path / "a.jsonl", [chat("q", "abc"), chat("r", "def")])
    other = write_jsonl(tmp_path / "b.jsonl", [chat("q", "abc"), chat("r", "deg")])
    prints = {
        prepared(base).fingerprint(),
        prepared(other).fingerprint(),
        prepared(base, train_on="all").fingerprint(),
        prepared({"path": base, "weight": 2.0}).fingerprint(),
        prepared(base, eval=other).fingerprint(),
    }
    assert len(prints) == 5
    assert prepared(base).fingerprint() in prints


def test_tokens_are_flat_arrays(tmp_path: Path) -> None:
    samples = prepared(write_jsonl(tmp_path / "r.jsonl", plain(*["some text"] * 1000))).train
    assert (samples.tokens.dtype, samples.supervised.dtype) == (np.int32, np.bool_)
    assert samples.tokens.nbytes + samples.supervised.nbytes == 5 * samples.token_count == 50_000
    assert np.shares_memory(samples[7].tokens, samples.tokens)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"path": "nowhere/at/all.d"}, "no tokenizer can be had"),
        ({"path": "."}, "the folder holds no tokenizer"),
        ({"chat_template": "nowhere.jinja"}, "the chat template cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(recipe("r.jsonl", sections={"tokenizer": section}))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "none"}}'),
        ("tokenizer.json", "\ufffd"),
    ],
)
def test_a_damaged_tokenizer_is_our_error(tmp_path: Path, file: str, content: str) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(resolve_asset(KJV), folder)
    (folder / file).write_text(content)
    with pytest.raises(DataError, match="no tokenizer can be had"):
        load_tokenizer(recipe("r.jsonl", sections={"tokenizer": {"path": str(folder)}}))


def test_a_template_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"{{ '\xe9' }}")
    with pytest.raises(DataError, match="it is not UTF-8"):
        load_tokenizer(recipe("r.jsonl", sections={"tokenizer": {"chat_template": str(tmp_path / "t.jinja")}}))


@pytest.mark.parametrize(
    ("weight", "message"),
    [(0.01, "draws none of its 4 rows"), (1e9, r"an epoch draws 4e\+09 rows"), (1e300, "an epoch draws")],
)
@pytest.mark.parametrize("key", ["train", "eval"])
def test_a_weight_draws_something_and_not_without_end(tmp_path: Path, key: str, weight: float, message: str) -> None:
    path = write_jsonl(tmp_path / "r.jsonl", plain(*"abcd"))
    sources: dict[str, object] = {"train": path} | {key: {"path": path, "weight": weight}}
    with pytest.raises(DataError, match=message):
        prepared(sources.pop("train"), **sources)


def test_a_number_that_is_none_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is nan, not a text"):
        prepared(write_jsonl(tmp_path / "r.jsonl", [chat("q", float("nan"))]))
