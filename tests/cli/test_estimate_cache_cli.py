"""``megatrain estimate-memory`` where sizes are known: no torch, the same answers, damaged caches."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from estimating import CONFIG, SHAPES, estimated

from megatrain.model.user_cache import cache_folder
from megatrain.train import machine
from megatrain.train.structure import collector_paused


def test_known_sizes_need_no_torch(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = estimated(capsys, folder)
    code = (
        "import sys\nfrom megatrain.cli.main import main\n"
        "try:\n    main(['estimate-memory', '--model', sys.argv[1], '--json'])\n"
        "except SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, cwd=tmp_path, timeout=120)
    assert done.stderr.splitlines()[-1] == "0 False False"
    assert json.loads(done.stdout)["device"] == before["device"]


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen2.5-7b"])
def test_known_sizes_give_the_same_answer(
    shape: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "disk_free", lambda path: 1 << 40)  # others write on the disk meanwhile
    described = {"vram": "24GiB", "host": "128GiB", "cores": 16}
    read = estimated(capsys, SHAPES / shape, **described)
    assert len(list((cache_folder() / "sizes").iterdir())) == 1
    assert estimated(capsys, SHAPES / shape, **described) == read


def test_the_collector_works_again_after_a_structure_was_read() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "damage", ["", "{", "[1]", '{"sizes": {}}', '{"sizes": {"layers": [], "stem": {}, "tail": {}}}']
)
def test_a_damaged_cache_is_read_anew(folder: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    before = estimated(capsys, folder)
    (kept,) = (cache_folder() / "sizes").iterdir()
    whole = kept.read_text()
    kept.write_text(damage)
    assert estimated(capsys, folder)["device"] == before["device"]
    assert kept.read_text() == whole
    values = json.loads(whole)
    values["sizes"]["stem"]["elems"] = "many"
    kept.write_text(json.dumps(values))
    assert estimated(capsys, folder)["device"] == before["device"]


def test_another_config_override_or_precision_is_another_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = estimated(capsys, folder)
    wider = estimated(capsys, folder, "model.config={num_hidden_layers: 5}")
    assert wider["params"]["total"] > first["params"]["total"]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 128}))
    assert estimated(capsys, folder)["params"]["total"] > wider["params"]["total"]
    assert len(list((cache_folder() / "sizes").iterdir())) == 3


def test_a_cache_that_cannot_be_written_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert estimated(capsys, folder)["fits"] is True
