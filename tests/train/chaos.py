"""Kill a run at random moments, fail its disk, damage its checkpoints, and resume it until it is done.

Its bits must be those of an undisturbed run, and no kill may cost more than the steps since the last checkpoint.

python tests/train/chaos.py --kills 200 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import PROGRAM, finetune
from whole import curve, state, weights, whole_recipe, write_rows

from megatrain.report.metrics import read_metrics
from megatrain.train.checkpoint import find_checkpoints

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PHASES = (
    "reading and tokenising",
    "reading the model's structure",
    "taking memory",
    "reading",  # weights or a checkpoint
    "eval",
    "step",
    "writing the checkpoint",
    "saved",
    "exporting",
)
FAULTS = (  # of the disk; {} is a random call
    "pwritev:ENOSPC:{}:1:/checkpoints/",
    "pwritev:EDQUOT:{}:2:/checkpoints/",
    "fsync:EIO:{}:1:/checkpoints/",
    "pwrite:ENOSPC:{}:3:metrics.jsonl",
    "pwritev:ENOSPC:{}:inf:/checkpoints/",
    "pwritev:0.02:1:inf:/checkpoints/",
)
SAVE_EVERY = 2


def write_recipe(folder: Path, *, rows: Path, save_every: int = SAVE_EVERY) -> Path:
    """The recipe of a run in folder/run, as a file."""
    recipe = whole_recipe(
        folder / "run",
        rows=rows,
        data={"eval_fraction": 0.2},
        train={"save_every": save_every, "eval_every": 3, "epochs": 3},
    )
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    return path


def start(
    recipe: Path, *options: str, faults: Sequence[str] = (), temporary: Path | None = None
) -> subprocess.Popen[str]:
    """A finetune process in a session of its own that resumes what it finds; stdout and stderr are pipes."""
    command = [sys.executable, "-c", PROGRAM, "finetune", str(recipe), "--resume", "auto", *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | _environment(faults, temporary),
        start_new_session=True,
    )


def _environment(faults: Sequence[str], temporary: Path | None) -> dict[str, str]:
    chosen = {"CHAOS_TESTS": str(Path(__file__).parent), "CHAOS_FAULTS": ",".join(faults)}
    return chosen | ({"TMPDIR": str(temporary)} if temporary is not None else {})


class Forked:
    """The same without the imports, which take most of a short life: a fork of this process. Speaks like Popen."""

    def __init__(self, recipe: Path, *, faults: Sequence[str], temporary: Path) -> None:
        reader, writer = os.pipe()
        sys.stdout.flush()
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            try:
                os.close(reader)
                self._work(recipe, writer=writer, environment=_environment(faults, temporary))
            finally:
                os._exit(1)
        os.close(writer)
        self.stderr = os.fdopen(reader)

    @staticmethod
    def _work(recipe: Path, *, writer: int, environment: dict[str, str]) -> None:
        os.setsid()
        os.dup2(writer, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.environ.update(environment)
        sys.argv = ["megatrain", "finetune", str(recipe), "--resume", "auto"]
        try:
            finetune()
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        except KeyboardInterrupt:  # before our handlers stood
            os._exit(128 + signal.SIGINT)
        except BaseException:
            traceback.print_exc()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """stdout is not kept."""
        guard = threading.Timer(timeout, lambda: os.kill(self.pid, signal.SIGABRT))
        guard.start()
        err = self.stderr.read()
        self.stderr.close()
        if self.poll() is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        guard.cancel()
        return "", err


@dataclass
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)  # the last line of stderr before the kill
    faults: Counter[str] = field(default_factory=Counter)  # disks that failed in a process, by kind
    ended: Counter[str] = field(default_factory=Counter)  # what became of processes with a failing disk
    damages: Counter[str] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)  # steps that a SIGKILL cost
    rounds: int = 0  # runs brought to their end
    problems: list[str] = field(default_factory=list)
    slowest_stop_s: float = 0.0

    def report(self) -> str:
        lost = ", ".join(f"{steps} steps: {count}" for steps, count in sorted(self.lost.items()))
        return "\n".join(
            [
                f"kills: {sum(self.kills.values())} {dict(self.kills)}",
                f"after: {dict(self.phases)}",
                f"failing disks: {dict(self.faults)}, ended with {dict(self.ended)}",
                f"damaged checkpoints: {dict(self.damages)}",
                f"lost by a SIGKILL: {lost}",
                f"runs brought to their end: {self.rounds}; slowest stop: {self.slowest_stop_s:.1f} s",
                f"problems: {len(self.problems)}",
                *self.problems,
            ]
        )


class Chaos:
    """Rounds of kills in `folder` against one undisturbed run."""

    def __init__(self, folder: Path, *, seed: int, span_s: float, forks: float) -> None:
        """`span_s`: kills by time come within so many seconds of a process's start. `forks`: the share of processes
        that are forks of this one."""
        self.tally = Tally()
        self._folder, self._draw, self._span_s = folder, random.Random(seed), span_s
        self._forks = forks
        self._history: list[str] = []  # of this round
        self._damaged = False  # in this round: what is lost is then our own doing
        self._rows = write_rows(folder / "rows with späces.jsonl")
        self._temporary = folder / "temporary"
        for path in (folder / "whole", self._temporary):
            path.mkdir()
        process = self._start(write_recipe(folder / "whole", rows=self._rows))
        _, err = process.communicate()
        assert process.returncode == 0, err

    def run(self, kills: int) -> Tally:
        while sum(self.tally.kills.values()) < kills:
            self._round()
        return self.tally

    def _round(self) -> None:
        work = self._folder / f"round {self.tally.rounds}"
        work.mkdir()
        self._history, self._damaged = [], False
        recipe = write_recipe(work, rows=self._rows)
        for _ in range(self._draw.randint(5, 12)):
            if not self._disturb(recipe, run=work / "run"):
                break
        process = self._start(recipe)
        _, err = process.communicate()
        self.tally.rounds += 1
        if process.returncode == 0:
            self._compare(work / "run")
        else:
            self._problem(f"{work.name}, the last resume: {process.returncode}: {err[-1000:]}")

    def _disturb(self, recipe: Path, *, run: Path) -> bool:
        """One process that is killed, mostly; False when it was done before."""
        fault = self._fault()
        faults = [fault] if fault else []
        process = self._start(recipe, faults=faults)
        signum = self._draw.choice(SIGNALS)
        said = self._wait_for_the_moment(process)
        running = process.poll() is None
        begin_s = time.monotonic()
        if running:
            process.send_signal(signum)
        _, err = process.communicate(timeout=120)
        if running:
            self.tally.slowest_stop_s = max(self.tally.slowest_stop_s, time.monotonic() - begin_s)
            self.tally.kills[signum.name] += 1
            self.tally.phases[phase_of(said + err)] += 1
        if fault:
            self.tally.faults[fault.split(":")[0] + " " + fault.split(":")[1]] += 1
            self.tally.ended[str(process.returncode)] += 1
        self._history.append(
            f"{signum.name if running else 'ended'} {phase_of(said + err)} {fault} {process.returncode}"
        )
        self._check_code(process.returncode, signum=signum if running else None, fault=fault, err=said + err)
        self._check_left(process)
        self._check_lost(run, killed=process.returncode == -signal.SIGKILL)
        if process.returncode == 0:
            return False
        if self._draw.random() < 0.2:
            self._damage(run)
        return True

    def _start(self, recipe: Path, *, faults: Sequence[str] = ()) -> subprocess.Popen[str] | Forked:
        if self._draw.random() < self._forks:
            return Forked(recipe, faults=faults, temporary=self._temporary)
        return start(recipe, faults=faults, temporary=self._temporary)

    def _fault(self) -> str | None:
        if self._draw.random() < 0.7:
            return None
        return self._draw.choice(FAULTS).format(self._draw.randint(1, 60))

    def _wait_for_the_moment(self, process: subprocess.Popen[str] | Forked) -> str:
        """A random time, or a little after a phase began. Returns what was read of stderr."""
        assert process.stderr is not None
        if self._draw.random() < 0.3:
            time.sleep(self._draw.uniform(0, self._span_s))
            return ""
        phase, times, said = self._draw.choice(PHASES), self._draw.randint(1, 3), ""
        for line in process.stderr:
            said += line
            if line.startswith(phase):
                times -= 1
                if not times:
                    break
        time.sleep(self._draw.choice((0, 0.001, 0.01, 0.05)))
        return said

    def _check_code(self, code: int, *, signum: int | None, fault: str | None, err: str) -> None:
        allowed = {0}  # it was just done
        if signum is not None:
            allowed |= {-signum, 128 + signum}  # the first: before our handlers stood
        if fault:
            allowed |= {3}
        if code not in allowed:
            self._problem(f"exit {code} after {signum} with {fault}: {err[-1000:]}")
        if "Traceback" in err and signum != signal.SIGINT:  # before our handler stands Python prints one
            self._problem(f"a traceback: {err[-1000:]}")

    def _check_left(self, process: subprocess.Popen[str] | Forked) -> None:
        """No process of its session, no shared memory and no temporary file outlive it."""
        try:
            os.killpg(process.pid, 0)
            self._problem(f"a child of process {process.pid} is left")
        except ProcessLookupError:
            pass
        left = [path.name for path in self._temporary.iterdir()]
        left += [path.name for path in Path("/dev/shm").glob(f"*{process.pid}*")]
        if left:
            self._problem(f"left behind: {left}")

    def _check_lost(self, run: Path, *, killed: bool) -> None:
        """Everything but the steps since the last checkpoint is safe, and those that were taken while the next was
        being written: at most as many again."""
        steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]
        usable = find_checkpoints(run / "checkpoints").usable
        lost = max(steps, default=0) - (usable[0].state.step if usable else 0)
        if killed and not self._damaged:
            self.tally.lost[lost] += 1
        if lost > 2 * SAVE_EVERY and not self._damaged:
            self._problem(f"{run}: {lost} steps are lost")

    def _damage(self, run: Path) -> None:
        found = find_checkpoints(run / "checkpoints").usable
        if not found:
            return
        kind = self._draw.choice(("cut off", "a bit flipped", "a file lost", "no manifest", "manifest cut off"))
        file = self._draw.choice(sorted(found[0].path.glob("*.safetensors")))
        manifest = found[0].path / "manifest.json"
        data = bytearray(file.read_bytes())
        match kind:
            case "cut off":
                file.write_bytes(data[: self._draw.randrange(len(data))])
            case "a bit flipped":
                data[self._draw.randrange(len(data))] ^= 1 << self._draw.randrange(8)
                file.write_bytes(data)
            case "a file lost":
                file.unlink()
            case "no manifest":
                manifest.unlink()
            case _:
                text = manifest.read_text()
                manifest.write_text(text[: self._draw.randrange(len(text))])
        self.tally.damages[kind] += 1
        self._history.append(f"{found[0].path.name}: {kind} {file.name}")
        self._damaged = True

    def _compare(self, run: Path) -> None:
        whole = self._folder / "whole" / "run"
        ours, theirs = state(run), state(whole)
        other = [name for name in theirs if ours.get(name) != theirs[name]]
        if weights(run) != weights(whole) or other:
            self._problem(f"{run}: other bits {other}")
        for kind, keys in (("train", ("step", "loss", "lr", "grad_norm")), ("eval", ("step", "loss"))):
            if curve(run, *keys, kind=kind) != curve(whole, *keys, kind=kind):
                self._problem(f"{run}: other {kind} lines")
        left = [path.name for path in run.rglob("*") if "partial" in path.name or path.name in ("lock", "crash.txt")]
        if left:
            self._problem(f"{run}: left behind {left}")

    def _problem(self, text: str) -> None:
        self.tally.problems.append("; ".join([text, *self._history]))


def phase_of(err: str) -> str:
    lines = [line for line in err.splitlines() if not line.startswith(("stopped", "interrupted", "warning"))]
    line = lines[-1] if lines else ""
    return next((phase for phase in PHASES if line.startswith(phase)), "starting" if not line else "other")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--span", type=float, default=6.0, help="seconds of a process within which a kill comes")
    parser.add_argument("--forks", type=float, default=0.8, help="share of processes that skip the imports")
    parser.add_argument("--keep", type=Path, help="copy everything there when there was a problem")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tally = Chaos(Path(folder), seed=chosen.seed, span_s=chosen.span, forks=chosen.forks).run(chosen.kills)
        if tally.problems and chosen.keep:
            shutil.copytree(folder, chosen.keep)
    print(tally.report())
    print(f"{time.monotonic() - begin_s:.0f} s")
    sys.exit(bool(tally.problems))


if __name__ == "__main__":
    main()
