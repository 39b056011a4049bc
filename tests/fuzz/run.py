"""Long fuzzing: ``python -m tests.fuzz.run [TARGET...] --minutes 10``.

Each target runs in a process of its own, so that a crash of the interpreter is a finding like any other. What was
found is written to --out, one small file for each place in the code; counts go to stdout as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

_FILE = Path(__file__).resolve()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        return _work(options.targets[0], minutes=options.minutes, out=options.out)
    from fuzz.targets import TARGETS

    found = 0
    for name in options.targets or list(TARGETS):
        found += _in_a_process(name, options=options)
    return 1 if found else 0


def _in_a_process(name: str, *, options: argparse.Namespace) -> int:
    command = [sys.executable, str(_FILE), name, "--worker", "--minutes", str(options.minutes)]
    command += ["--out", str(options.out)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        code = process.wait(timeout=options.minutes * 60 + 300)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = -9
    if code in (0, 1):
        return code
    print(json.dumps({"target": name, "died": code}), flush=True)
    return 1


class Findings:
    """Runs inputs of one target and keeps the smallest that fails in each place."""

    def __init__(self, name: str, *, out: Path) -> None:
        from fuzz.targets import TARGETS

        self.target, self.out = TARGETS[name], out
        self.counts = {"valid": 0, "refused": 0, "failed": 0}
        self.smallest: dict[str, bytes] = {}

    def __call__(self, data: bytes) -> None:
        from fuzz.guard import outcome

        (self.out / f"{self.target.name}.last").write_bytes(data)  # what a crash of the interpreter leaves behind
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        try:
            self.counts[outcome(self.target, data, folder=folder)] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.counts["failed"] += 1
            self._keep(data, error=error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, data: bytes, *, error: BaseException) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/fuzz/" not in f.filename]
        place = f"{Path(frames[-1].filename).stem}-{frames[-1].lineno}" if frames else "check"
        key = f"{self.target.name}-{type(error).__name__}-{place}"
        if key not in self.smallest or len(data) < len(self.smallest[key]):
            self.smallest[key] = data
            (self.out / key).write_bytes(data)
            text = "".join(traceback.format_exception(error))
            (self.out / f"{key}.txt").write_text(text[-6000:], errors="backslashreplace")


def _work(name: str, *, minutes: float, out: Path) -> int:
    findings = Findings(name, out=out)
    begin_s = time.monotonic()
    _random(findings, seconds=minutes * 60)
    line = {"target": name, "inputs": sum(findings.counts.values()), **findings.counts}
    print(json.dumps(line | {"places": len(findings.smallest), "s": round(time.monotonic() - begin_s)}), flush=True)
    (out / f"{name}.last").unlink(missing_ok=True)
    return 1 if findings.smallest else 0


def _random(findings: Findings, *, seconds: float) -> None:
    from hypothesis import HealthCheck, Phase, given, settings

    options = settings(
        max_examples=1000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    until_s = time.monotonic() + seconds

    @options
    @given(data=findings.target.inputs)
    def once(data: bytes) -> None:
        if time.monotonic() < until_s:
            findings(data)

    while time.monotonic() < until_s:
        once()


if __name__ == "__main__":
    sys.exit(main())
