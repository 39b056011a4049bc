"""The command line as a user meets it: real processes, their stdout, stderr and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from megatrain.cli import main as entry
from megatrain.cli.output import emit, guarded
from megatrain.errors import DeviceError, DoesNotFit, MegatrainError, NonFinite, RecipeError
from megatrain.recipe import load_recipe, shipped_recipes

MINIMAL = "model:\n  path: m\ndata:\n  train: a.jsonl\noutput:\n  dir: runs/x\n"


def megatrain(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatrain", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same in this process, which is faster: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        entry.main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def last_object(stdout: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    return value


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["finetune", "--help"],
        ["recipe", "check", "quickstart"],
        ["recipe", "show", "quickstart"],
        ["recipe", "schema"],
        ["recipe", "new"],
        ["recipe", "list"],
    ],
)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom megatrain.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "finally: print([name for name in ('torch', 'transformers', 'datasets', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines()[-1] == "[]"


def test_shell_completion_answers_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    run = megatrain(
        cwd=tmp_path,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
        _MEGATRAIN_COMPLETE="complete_bash",
        COMP_WORDS="megatrain fin",
        COMP_CWORD="1",
    )
    assert "finetune" in run.stdout.split()
    assert run.stderr == ""


def test_every_command_of_the_contract_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ["finetune", "estimate-memory", "bench", "verify", "export", "recipe", "data", "report", "doctor"]
    for command in commands:
        code, out, _ = called(capsys, command, "--help")
        assert code == 0
        assert "Usage: megatrain" in out
    for command in ("list", "copy", "check", "show", "schema", "new"):
        assert called(capsys, "recipe", command, "--help")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--model", "gpt2", "--set", "optimizer.lr=1"],
        ["report", "runs/a", "runs/b"],
    ],
)
def test_commands_of_later_versions_say_so(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.strip() == f"error: `megatrain {arguments[0]}` is not available yet"
    code, out, _ = called(capsys, *arguments, "--json")
    assert code == 2
    assert last_object(out)["error"]["kind"] == "not_available"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetun"], "did you mean"),
        (["finetune"], "RECIPE"),
        (["finetune", "a", "b"], "unexpected"),
        (["finetune", "quickstart", "--bogus"], "--bogus"),
        (["data", "quickstart", "--rows", "many"], "--rows"),
        (["recipe", "chek"], "check"),
        (["recipe", "check"], "RECIPE"),
        (["export", "only-one"], "OUT"),
        (["report"], "RUN_DIR"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = called(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message.lower() in err.lower()
    assert "\nhint: " in err
    assert "Traceback" not in err
    code, out, _ = called(capsys, *arguments, "--json")
    assert code == 2
    assert len(out.splitlines()) == 1
    failure = last_object(out)
    assert (failure["status"], failure["exit_code"], failure["error"]["kind"]) == ("error", 2, "usage")


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["recipe"]):
        code, out, err = called(capsys, *arguments)
        assert code == 2
        assert "Usage: megatrain" in out + err


def test_check_several_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(MINIMAL + "optimizer:\n  lr: 1e-5x\ntrain:\n  sed: 3\n")
    code, out, err = called(capsys, "recipe", "check", *shipped_recipes())
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"{name}: ok" for name in shipped_recipes()]
    code, out, err = called(capsys, "recipe", "check", "quickstart", str(bad), "nowhere")
    assert code == 2
    assert out == "quickstart: ok\n"
    assert f"{bad}:8: optimizer.lr: must be a number, not `1e-5x`" in err
    assert f"{bad}:10: train.sed: there is no such key\n    did you mean `train.seed`?" in err
    assert "nowhere: there is no such file or shipped recipe" in err
    code, out, _ = called(capsys, "recipe", "check", "quickstart", str(bad), "--json")
    result = last_object(out)
    assert [entry["status"] for entry in result["recipes"]] == ["ok", "error"]
    assert (code, result["status"], result["exit_code"], result["error"]["kind"]) == (2, "error", 2, "recipe")
    code, out, _ = called(capsys, "recipe", "check", "quickstart", "--json")
    assert (code, last_object(out)["status"]) == (0, "ok")


def test_check_with_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "recipe", "check", "quickstart", "--set", "data.eval_fraction=0.2")[0] == 0
    code, _, err = called(capsys, "recipe", "check", "quickstart", "--set", "optimizer.lr=-1")
    assert code == 2
    assert err == "error: --set optimizer.lr: must be more than 0, not `-1`\n"


def test_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["recipe", "show", "quickstart", "--set", "optimizer.lr=2e-5", "--set", "data.train=[a.jsonl,b.jsonl]"]
    code, out, err = called(capsys, *arguments)
    assert (code, err) == (0, "")
    path = tmp_path / "shown.yaml"
    path.write_text(out)
    recipe = load_recipe(str(path))
    assert recipe.optimizer.lr == 2e-5
    assert [source.path for source in recipe.data.train] == ["a.jsonl", "b.jsonl"]
    code, json_out, _ = called(capsys, *arguments, "--json")
    assert code == 0
    assert last_object(json_out) == yaml.safe_load(out) == recipe.to_dict()


def test_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert called(capsys, "recipe", "copy", "quickstart") == (0, "quickstart.yaml\n", "")
    assert (tmp_path / "quickstart.yaml").read_bytes() == shipped_recipes()["quickstart"].read_bytes()
    code, _, err = called(capsys, "recipe", "copy", "quickstart")
    assert code == 2
    assert "the file exists" in err
    assert "hint: --force" in err
    (tmp_path / "quickstart.yaml").write_text("mine")
    assert called(capsys, "recipe", "copy", "quickstart", "--force")[0] == 0
    assert load_recipe("quickstart.yaml") == load_recipe("quickstart")
    assert called(capsys, "recipe", "copy", "qwen3-14b", "big.yaml", "--json")[1].strip().endswith('"big.yaml"}')
    code, _, err = called(capsys, "recipe", "copy", "quikstart")
    assert code == 2
    assert "hint: did you mean the shipped recipe `quickstart`?" in err
    assert called(capsys, "recipe", "copy", "quickstart", "no/such/folder/x.yaml")[0] == 2


def test_new_and_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    code, out, _ = called(capsys, "recipe", "new")
    assert code == 0
    assert called(capsys, "recipe", "new", str(path))[0] == 0
    assert path.read_text() == out
    assert called(capsys, "recipe", "new", str(path))[0] == 2
    assert called(capsys, "recipe", "check", str(path))[0] == 0
    schema = json.loads(called(capsys, "recipe", "schema")[1])
    assert schema == last_object(called(capsys, "recipe", "schema", "--json")[1])
    assert schema["properties"]["optimizer"]


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "recipe", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(shipped_recipes())
    names = [entry["name"] for entry in last_object(called(capsys, "recipe", "list", "--json")[1])["recipes"]]
    assert names == list(shipped_recipes())


def test_no_escape_codes_when_not_on_a_terminal() -> None:
    run = megatrain("recipe", "show", "nowhere")
    assert "\x1b" not in run.stdout + run.stderr
    assert run.returncode == 2


def test_a_reader_that_stops_early_is_no_error() -> None:
    code = f"{sys.executable} -m megatrain recipe schema | true"
    run = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError("m", hint="h", where="w"), 2),
        (DoesNotFit("m", hint="h", where="w"), 3),
        (DeviceError("m", hint="h", where="w"), 3),
        (NonFinite("m", hint="h", where="w"), 4),
    ],
)
def test_failures_become_message_hint_and_code(
    capsys: pytest.CaptureFixture[str], error: MegatrainError, code: int
) -> None:
    assert fails(error, json=False) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: w: m\nhint: h\n")
    assert fails(error, json=True) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "status": "error",
        "exit_code": code,
        "error": {"kind": error.kind, "message": "m", "hint": "h", "where": "w"},
    }
    assert captured.err == "error: w: m\nhint: h\n"


def fails(error: BaseException, *, json: bool, crash_dir: Path | None = None) -> int:
    """The exit code that the failure of a guarded block ends with."""
    try:
        with guarded(json=json) as guard:
            guard.crash_dir = crash_dir
            raise error
    except typer.Exit as end:
        return end.exit_code
    raise AssertionError("the failure was lost")


def test_a_bug_of_ours_leaves_its_traceback_in_the_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert fails(ValueError("boom\nsecond line"), json=True, crash_dir=tmp_path) == 1
    captured = capsys.readouterr()
    assert "Traceback (most recent call last)" in (tmp_path / "crash.txt").read_text()
    assert len(captured.err.splitlines()) == 1
    assert str(tmp_path / "crash.txt") in captured.err
    failure = json.loads(captured.out)
    assert failure["error"]["kind"] == "internal"
    assert failure["error"]["where"] == str(tmp_path / "crash.txt")


def test_a_bug_without_a_run_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert fails(KeyError("x"), json=False) == 1
    (file,) = tmp_path.iterdir()
    assert "KeyError" in file.read_text()
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (MemoryError(), 3, "does_not_fit"),
        (OSError(28, "No space left on device", "/data/x"), 3, "disk"),
        (OSError(5, "Input/output error", "/data/x"), 3, "disk"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_of_the_machine(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, kind: str
) -> None:
    assert fails(error, json=True) == code
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == kind


def test_results_with_numbers_that_json_does_not_have_are_a_bug() -> None:
    with pytest.raises(ValueError, match="JSON"):
        emit({"loss": float("nan")})


def test_a_closed_stdout_is_no_bug_of_ours() -> None:
    command = [sys.executable, "-m", "megatrain", "recipe", "list"]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, preexec_fn=lambda: os.close(1)
    )
    assert (done.returncode, done.stderr) == (0, "")
