"""Baselines: the same work in child processes that never outlive us, and words for why one did not run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatrain.cli.bench_text import baseline_table
from megatrain.errors import UsageError
from megatrain.recipe import resolve_asset
from megatrain.train.baselines import runner
from megatrain.train.baselines.deepspeed import settings
from megatrain.train.baselines.runner import Baseline, parse_names, reason, run_baselines, run_child
from megatrain.train.baselines.work import LEARNING_RATE, Work, build_model, micro_batch, plain_step

WORK = Work(
    model=str(resolve_asset("megatrain:kjv-tiny")),
    seq_len=32,
    tokens_per_step=7 * 32,
    micro_batch=3,
    steps=1,
    precision="fp32",
)
CPU = torch.device("cpu")


def child(name: str, code: str, *, folder: Path, timeout_s: float = 60) -> Baseline:
    return run_child(name, command=[sys.executable, "-c", code], folder=folder, timeout_s=timeout_s)


def gone(pid: int) -> bool:
    """Whether the process ends within a few seconds (a zombie has ended)."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


# --- the work ----------------------------------------------------------------------------------------------


def test_every_sequence_of_a_step_is_in_one_micro_batch() -> None:
    assert WORK.sizes == (3, 3, 1)
    assert replace(WORK, micro_batch=7).sizes == (7,)
    assert sum(replace(WORK, tokens_per_step=64 * 32, micro_batch=11).sizes) == 64


def test_work_survives_the_way_to_a_child(tmp_path: Path) -> None:
    work = replace(WORK, config={"num_hidden_layers": 2}, max_grad_norm=None)
    work.write(tmp_path / "work.json")
    assert Work.read(tmp_path / "work.json") == work


@pytest.mark.skipif(torch.cuda.is_available(), reason="the work goes to the GPU where there is one")
def test_a_plain_step_is_one_step_of_adamw_on_the_mean_loss_of_all_sequences() -> None:
    ours, theirs = (build_model(WORK, device=CPU, dtype=torch.float32) for _ in range(2))
    loss = plain_step(
        WORK, model=ours, optimizer=torch.optim.AdamW(ours.parameters(), lr=LEARNING_RATE, fused=True), number=5
    )
    vocabulary = theirs.config.vocab_size
    ids = torch.cat(
        [micro_batch(WORK, rows=rows, seed=5000 + m, vocabulary=vocabulary) for m, rows in enumerate(WORK.sizes)]
    )
    logits = theirs(input_ids=ids).logits
    whole = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    whole.backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE, fused=True).step()
    assert loss == pytest.approx(float(whole.detach()), rel=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2.1 * LEARNING_RATE, msg=lambda text, n=name: f"{n}: {text}")
    moved = [not torch.equal(a, b) for a, b in zip(ours.parameters(), build_model_parameters(), strict=True)]
    assert all(moved)


def build_model_parameters() -> list[torch.nn.Parameter]:
    return list(build_model(WORK, device=CPU, dtype=torch.float32).parameters())


def test_tied_weights_stay_tied_and_nothing_is_left_without_storage() -> None:
    model = build_model(WORK, device=CPU, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_deepspeed_is_told_the_whole_step_and_to_offload_both_ways() -> None:
    found = settings(replace(WORK, precision="bf16"))
    assert found["train_micro_batch_size_per_gpu"] == 3
    assert found["gradient_accumulation_steps"] == 3
    assert found["gradient_clipping"] == 1.0
    assert found["bf16"] == {"enabled": True}
    zero = found["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert zero["overlap_comm"] is True
    assert "gradient_clipping" not in settings(replace(WORK, max_grad_norm=None))


@pytest.mark.slow
def test_resident_and_fsdp_do_the_same_work() -> None:
    resident, fsdp = run_baselines(("resident", "fsdp"), work=replace(WORK, steps=2), timeout_s=300)
    assert resident.failure is None
    assert fsdp.failure is None
    assert resident.result["losses"] == pytest.approx(fsdp.result["losses"], rel=1e-5)
    assert len(resident.result["losses"]) == 4  # type: ignore[arg-type]
    assert resident.host_peak_bytes > 1 << 26


# --- children ----------------------------------------------------------------------------------------------


def test_names_are_checked() -> None:
    assert parse_names("resident, fsdp,") == ("resident", "fsdp")
    with pytest.raises(UsageError, match="magic"):
        parse_names("resident,magic")


def test_the_last_json_line_is_the_result_whatever_else_a_library_prints(tmp_path: Path) -> None:
    code = 'import os; print("noise"); print(\'{"baseline": "x", "step_s": 2.0, "tokens_per_s": 5.0}\'); print("bye")'
    found = child("x", code, folder=tmp_path)
    assert (found.failure, found.tokens_per_s, found.seconds) == (None, 5.0, 2.0)
    assert found.result["host_grown_bytes"] >= 0  # type: ignore[operator]


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    assert child("x", "raise ValueError('no such thing')", folder=tmp_path).failure == "ValueError: no such thing"
    assert child("x", "import sys; sys.exit(3)", folder=tmp_path).failure == "ended with exit code 3"
    killed = child("x", "import os; os.kill(os.getpid(), 9)", folder=tmp_path)
    assert killed.failure == "does not fit in host memory (killed)"
    assert killed.tokens_per_s is None


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "does not fit in VRAM"),
        ("RuntimeError: CUDA error: out of memory", "host memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", "host memory"),
        ("ModuleNotFoundError: No module named 'deepspeed'", "not installed"),
        ("Traceback\n  File x\nRuntimeError: odd\n\n", "RuntimeError: odd"),
    ],
)
def test_failures_in_words(stderr: str, words: str) -> None:
    assert words in reason(stderr, code=1)


def test_a_child_over_its_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(inner.pid))
time.sleep(600)
"""
    found = child("x", code, folder=tmp_path, timeout_s=5)
    assert found.failure == "not done after 5 s"
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_takes_the_hosts_last_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SPARE_BYTES", 1 << 60)
    found = child("x", "import time; time.sleep(600)", folder=tmp_path)
    assert found.failure is not None
    assert found.failure.startswith("does not fit in host memory (")


def test_an_interrupt_leaves_no_child_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"

    def interrupt(watch: object) -> bool:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(runner._HostWatch, "exhausted", interrupt)
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        child("x", code, folder=tmp_path)
    assert gone(int(pid.read_text()))


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    WORK.write(tmp_path / "work.json")
    inner = f"""
import os, sys, time
from megatrain.train.baselines.child import begin
sys.argv = ["x", {str(tmp_path / "work.json")!r}]
begin()
open({str(tmp_path / "pid.new")!r}, "w").write(str(os.getpid()))
os.rename({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r})
time.sleep(600)
"""
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", outer])
    try:
        for _ in range(600):
            if (tmp_path / "pid").exists():
                break
            time.sleep(0.1)
        pid = int((tmp_path / "pid").read_text())
        assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 1000
        os.kill(parent.pid, signal.SIGKILL)
        assert gone(pid)
    finally:
        parent.kill()
        parent.wait()


# --- the table ---------------------------------------------------------------------------------------------


def test_the_table_compares_and_says_who_did_not_fit() -> None:
    class Ours:
        step_s, tokens_per_s, vram_peak_bytes, host_peak_bytes, data = 1.0, 2000.0, 3 << 30, 4 << 30, "random tokens"

    result = {"step_s": 2.0, "tokens_per_s": 1000.0, "vram_peak_bytes": 5 << 30, "host_peak_bytes": 6 << 30}
    others = [Baseline("resident", result, None), Baseline("fsdp", {}, "does not fit in VRAM")]
    lines = baseline_table(others, report=Ours()).splitlines()  # type: ignore[arg-type]
    assert lines[1].split()[:4] == ["megatrain", "1.000", "s", "2,000"]
    assert lines[2].split() == ["resident", "2.000", "s", "1,000", "2.00", "x", "5.0", "GiB", "6.0", "GiB"]
    assert lines[3].split(maxsplit=1) == ["fsdp", "does not fit in VRAM"]
    json.dumps(result)
