"""Interrupts in real processes: what the first does, what the second does, and when nothing can be done."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megatrain.train import signals
from megatrain.train.signals import Interrupted, PolledUpdates, StopFlag

PROGRAM = """
import ctypes, sys, time
from megatrain.train import signals
from megatrain.train.signals import Interrupted, SignalGuard

mode = sys.argv[1]
signals.RAISE_GRACE_S = 5.0 if mode == "destructor" else 1.0
assert "torch" not in sys.modules, "the guard must stand before torch is imported"


def native():
    "Native code that never returns: no bytecode of the main thread runs again, and the GIL is free."
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


with SignalGuard() as guard:
    try:
        if mode == "held":
            guard.stop.kept = "step-000007"
            with guard.stop.held():
                guard.stop.announce = lambda words: print(words, file=sys.stderr, flush=True)
                print("ready", flush=True)
                until = time.monotonic() + 20
                while not guard.stop.requested and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(0.3)  # the running step ends
                print("saved", flush=True)
            guard.stop.check()
        elif mode == "swallowed":
            print("ready", flush=True)
            try:
                time.sleep(60)
            except BaseException:
                time.sleep(60)
        elif mode == "destructor":
            class Slow:
                def __del__(self):
                    print("ready", flush=True)
                    time.sleep(0.5)
            Slow()
            time.sleep(20)
        elif mode == "deaf":
            guard.stop.kept = sys.argv[2] if len(sys.argv) > 2 else None
            with guard.stop.held():
                guard.stop.announce = lambda words: time.sleep(60)  # whoever should hear it is stuck
                print("ready", flush=True)
                native()
        elif mode == "stuck":
            print("ready", flush=True)
            native()
        else:
            print("ready", flush=True)
            time.sleep(60)
    except Interrupted as interrupt:
        print(f"unwound {interrupt}", flush=True)
        sys.exit(interrupt.exit_code)
"""


def _hangs_up() -> None:
    """Also where the tests themselves run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(mode: str, *prefix: str, after: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", PROGRAM, mode, *after]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hangs_up,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    while "ready" not in line:  # nohup speaks first
        assert line, process.communicate()
        line = process.stdout.readline()
    time.sleep(0.3)  # from saying so to being there
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_where_nothing_is_lost_the_first_signal_raises_at_once(signum: signal.Signals) -> None:
    process = start("free")
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (128 + signum, f"unwound {signum.name}\n"), err


def test_held_finishes_and_saves_first() -> None:
    process = start("held")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (143, "saved\nunwound SIGTERM\n"), err
    assert "the running step comes to its end, or is given up after 10 s, and a checkpoint is written" in err
    assert "a second signal ends at once, and what came after step-000007 is lost" in err


def test_what_raises_at_once_announces_nothing() -> None:
    stop, said = StopFlag(), []
    stop.announce = said.append
    stop.request(signal.SIGINT)
    stop.tell()
    assert stop.raises
    assert said == []


@pytest.mark.parametrize(("kept", "words"), [((), "nothing is saved"), (("run/step-000004",), "step-000004 is lost")])
def test_the_second_signal_says_what_is_left(kept: tuple[str, ...], words: str) -> None:
    process = start("deaf", after=kept)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, err = process.communicate(timeout=2)
    assert (process.returncode, words in err) == (130, True), err


def test_the_second_signal_ends_it_even_in_native_code() -> None:
    process = start("deaf")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=2)
    assert process.returncode == 130
    assert "second signal" in err


def test_native_code_with_nothing_to_save_is_ended_after_its_grace() -> None:
    process = start("stuck")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert "interrupted" in err


def test_an_interrupt_that_a_library_swallows_ends_the_process_all_the_same() -> None:
    process = start("swallowed")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert "interrupted" in err


def test_an_interrupt_that_a_destructor_swallows_is_raised_again_and_not_printed() -> None:
    process = start("destructor")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (143, "unwound SIGTERM\n", "")


def test_nohup_is_respected() -> None:
    process = start("free", "nohup")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


class Updates:
    def updated(self, unit: int) -> bool:
        return True

    def wait_updated(self, unit: int) -> None:
        pass


def test_a_long_step_is_given_up_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopFlag()
    updates = PolledUpdates(Updates(), stop=stop)
    assert updates.updated(0)
    stop.request(signal.SIGINT)
    assert updates.updated(0), "the step has its time first"
    monkeypatch.setattr(signals, "STEP_GRACE_S", -1.0)
    with pytest.raises(Interrupted):
        updates.updated(0)
    with pytest.raises(Interrupted):
        updates.wait_updated(0)


def test_the_first_signal_names_the_exit_code() -> None:
    stop = StopFlag()
    stop.check()
    stop.request(signal.SIGHUP)
    stop.request(signal.SIGINT)
    with pytest.raises(Interrupted) as caught:
        stop.check()
    assert caught.value.exit_code == 129
