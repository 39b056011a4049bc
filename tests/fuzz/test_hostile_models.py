"""Model folders that were made to do harm: refused by name and soon, without running or following anything."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fuzz.commands import ask, write_recipe
from fuzz.guard import bounded
from megatrain.errors import ModelError
from megatrain.host.source import locate
from megatrain.model import hub
from megatrain.recipe import resolve_asset


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(resolve_asset("megatrain:kjv-tiny"), tmp_path / "model")
    return tmp_path / "model"


def change(model: Path, **values: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


ABSURD = {
    "num_hidden_layers": [10**6, 0, -1],
    "hidden_size": [10**9, -1, 0, float("nan")],
    "vocab_size": [0, -1, 10**18],
    "intermediate_size": [10**12],
    "num_attention_heads": [10**6],
    "head_dim": [10**9],
    "attention_dropout": [1.5, -0.1, float("nan"), 1],
    "rms_norm_eps": [float("nan")],
    "num_labels": [10**7],
    "max_position_embeddings": [10**40, 0, -5],
    "attn_implementation": ["evil/kernel"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ABSURD.items() for value in values])
def test_absurd_values_are_refused_by_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    change(model, **{key: value})
    with bounded():
        answer = ask(capsys, "finetune", write_recipe(tmp_path, model=str(model)), "--dry-run")
    assert answer.code == 2
    assert answer.message.startswith(f"{model / 'config.json'}: {key} ")


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "128"), ("rope_scaling", 5), ("return_dict", False)])
def test_values_of_another_kind(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    change(model, **{key: value})
    answer = ask(capsys, "finetune", write_recipe(tmp_path, model=str(model)), "--dry-run")
    assert answer.code == 2


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[]", "\0", "", '{"hidden_size": ' + "9" * 5000 + "}"])
def test_a_config_that_is_none(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (model / "config.json").write_text(text)
    answer = ask(capsys, "finetune", write_recipe(tmp_path, model=str(model)), "--dry-run")
    assert answer.code == 2
    assert answer.message.startswith(str(model / "config.json"))


def test_overrides_of_the_config_are_held_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    answer = ask(capsys, "finetune", recipe, "--dry-run", "--set", "model.config.attention_dropout=1.5")
    assert (answer.code, "attention_dropout is a probability" in answer.message) == (2, True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_attention_heads: 3", "num_attention_heads (3) must be a multiple of num_key_value_heads (2)"),
        ("hidden_size: 126, head_dim: null", "num_attention_heads (4) must divide hidden_size (126) where no head_dim"),
        ("max_position_embeddings: -5", "max_position_embeddings must be from 1 to"),
        ("max_position_embeddings: 0", "max_position_embeddings must be from 1 to"),
    ],
)
def test_overrides_that_no_model_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    answer = ask(capsys, "finetune", write_recipe(tmp_path), "--dry-run", "--set", f"model.config={{{override}}}")
    assert answer.code == 2
    assert answer.message.startswith(f"model.config: {message}")


def test_heads_need_not_divide_the_hidden_size_where_their_width_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = "model={init: random, config: {num_attention_heads: 6, head_dim: 16}}"
    assert ask(capsys, "finetune", write_recipe(tmp_path), "--dry-run", "--set", override).code == 0


def test_code_that_comes_with_a_model_is_named_and_not_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    change(model, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    answer = ask(capsys, "finetune", write_recipe(tmp_path, model=str(model)), "--dry-run")
    assert (answer.code, "Python code (auto_map), which is not run" in answer.message) == (2, True)
    assert "trust_remote_code" in answer.result["error"]["hint"]
    change(model, model_type="llama")  # transformers has code of its own for it
    assert ask(capsys, "finetune", write_recipe(tmp_path, model=str(model)), "--dry-run").code == 0
    assert not (tmp_path / "owned").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_pickles_are_never_loaded(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "owned")))
    answer = ask(capsys, "finetune", write_recipe(tmp_path, model=str(model)))
    assert (answer.code, "pytorch_model.bin, which can run code when loaded" in answer.message) == (2, True)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "\0.safetensors"])
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=r"is not the name of a safetensors file|which is not there"):
        locate(tmp_path / "model")


def test_a_shard_that_is_a_link_is_read_as_a_safetensors_file_or_not_at_all(tmp_path: Path) -> None:
    """The hub's cache is made of links, so they are followed; what they lead to must be whole tensors."""
    (tmp_path / "secret").write_text("hunter2")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="damaged safetensors file") as caught:
        locate(folder)
    assert "hunter2" not in str(caught.value)
    for target in ("/dev/zero", "loop", "absent"):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(folder / "model.safetensors" if target == "loop" else target)
        with pytest.raises(ModelError, match="has neither"):
            locate(folder)


def test_a_tokenizer_whose_library_panics(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    answer = ask(capsys, "data", write_recipe(tmp_path, model=str(model)))
    assert (answer.code, "no tokenizer can be had" in answer.message) == (2, True)


def test_a_tokenizer_without_end(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (model / "tokenizer.json").open("r+b") as file:
        file.truncate(2 << 30)
    answer = ask(capsys, "data", write_recipe(tmp_path, model=str(model)))
    assert (answer.code, "a tokenizer of 2.0 GiB" in answer.message) == (2, True)


def test_a_tokenizer_of_another_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(model, vocab_size=300)
    answer = ask(capsys, "data", write_recipe(tmp_path, model=str(model)))
    assert (answer.code, "the model knows 300" in answer.message) == (2, True)


@pytest.mark.parametrize("what", ["model", "tokenizer", "data"])
def test_a_hub_that_does_not_answer_is_asked_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    asked: list[object] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise OSError("no route")

    hub.reachable.cache_clear()
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.huggingface_hub, "get_session", Session)
    try:
        sections: dict[str, dict[str, Any]] = {
            "model": {"model": "nobody/at-all"},
            "tokenizer": {"tokenizer": {"path": "nobody/at-all"}},
            "data": {"train": "nobody/at-all"},
        }
        answer = ask(capsys, "finetune", write_recipe(tmp_path, **sections[what]), "--dry-run")
    finally:
        hub.reachable.cache_clear()
    assert answer.code == 2
    assert "nobody/at-all" in answer.message
    assert "network" in answer.result["error"]["hint"]
    assert len(asked) == 1


OFFLINE_RUN = """
import socket, sys
def refuse(*arguments, **named):
    raise AssertionError(f"asked for the network: {arguments[1:]}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from megatrain.cli.main import main
main(sys.argv[1:])
"""


def test_a_local_run_asks_for_no_network_and_writes_nothing_of_the_environment(model: Path, tmp_path: Path) -> None:
    """A whole run, whose process cannot open a connection, and whose environment holds something to find."""
    recipe = write_recipe(tmp_path, model=str(model), train={"path": "megatrain:devil.jsonl", "limit": 2})
    secrets = {"MY_SECRET": "hunter2-in-the-environment", "HF_TOKEN": "hf_hunter2"}
    environment = os.environ | secrets | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OFFLINE_RUN, "finetune", recipe, "--json", "--set", "train.steps=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "hunter2" not in done.stdout + done.stderr
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"recipe.yaml", "run.json", "metrics.jsonl"} <= {path.name for path in written}
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
