"""``megatrain finetune``: the command around a training session."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatrain.cli.output import Guard, emit, error_object, print_error
from megatrain.errors import MegatrainError
from megatrain.recipe import load_recipe
from megatrain.report.console import Console, open_console
from megatrain.report.events import RunReport
from megatrain.train.signals import Interrupted, SignalGuard
from megatrain.units import format_seconds, format_size

if TYPE_CHECKING:
    from megatrain.train.session import Session


def run(
    recipe: str,
    *,
    overrides: Sequence[str],
    output_dir: str | None,
    resume: str,
    dry_run: bool,
    json: bool,
    quiet: bool,
    guard: Guard,
) -> int:
    """Train as `recipe` says; returns the exit code. Results go to stdout, everything else to stderr."""
    with SignalGuard() as signals:
        console: Console | None = None
        session: Session | None = None
        try:
            loaded = load_recipe(recipe, overrides=overrides, output_dir=output_dir)
            console = open_console(quiet=quiet)
            _quieten_libraries()
            logging.getLogger("megatrain").addHandler(_ToConsole(console))
            from megatrain.train.session import Session

            session = Session(loaded, resume=resume, console=console, stop=signals.stop)
            if dry_run:
                outlook = session.dry_run()
                console.close()
                emit(outlook) if json else print(_outlook_text(outlook))
                return 0
            report = session.run()
            console.close()
            emit(report.to_json()) if json else print(_report_text(report))
            return report.exit_code
        except Interrupted as interrupt:
            signals.stop.handled()
            if console is not None:
                console.close()
            print(f"interrupted by {interrupt}", file=sys.stderr)
            if json:
                emit(_interrupted(session, exit_code=interrupt.exit_code))
            return interrupt.exit_code
        except MegatrainError as error:
            if console is not None:
                console.close()
            print_error(error)
            if json:
                emit(_summary(session) | error_object(error))
            return error.exit_code
        except Exception:
            if console is not None:
                console.close()
            if session is not None and session.owns_folder:
                guard.crash_dir = session.rundir.path
            raise  # a bug of ours: `guarded` writes crash.txt


def _summary(session: Session | None) -> dict[str, Any]:
    """What run.json says or should say, where there is something to say."""
    return session.summary if session is not None else {}


def _interrupted(session: Session | None, *, exit_code: int) -> dict[str, Any]:
    return _summary(session) | {"status": "interrupted", "exit_code": exit_code}


class _ToConsole(logging.Handler):
    """What our own rooms log as warnings is told like the run's own."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(record.getMessage())


def _quieten_libraries() -> None:
    """Progress bars and advice of libraries would break plain logs; what they refuse still comes as an exception.

    Read when they are imported, so this comes before that. Who sets these variables keeps them.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _report_text(report: RunReport) -> str:
    lines = [
        f"{report.steps} steps, {report.epochs:g} epochs, {report.tokens:,} tokens"
        + (f", {report.tokens_here:,} of them after the resume," if report.tokens_here != report.tokens else "")
        + f" in {format_seconds(report.wall_s)}"
        + (f" (steps alone: {report.tokens_per_s:,.0f} tok/s)" if report.tokens_per_s else ""),
    ]
    if report.first_loss is not None and report.last_loss is not None:
        lines.append(f"loss {report.first_loss:.4f} -> {report.last_loss:.4f}")
    if report.first_eval_loss is not None and report.eval_loss is not None:
        lines.append(f"held-out loss {report.first_eval_loss:.4f} -> {report.eval_loss:.4f}")
    if report.skipped_steps:
        lines.append(f"{report.skipped_steps} steps were skipped because they were not finite")
    vram = f", VRAM {format_size(report.vram_peak_bytes)}" if report.vram_peak_bytes else ""
    lines.append(f"peak memory: host {format_size(report.host_peak_bytes)}{vram}")
    if report.checkpoint is not None:
        lines.append(f"checkpoint: {report.checkpoint}")
    if report.model is not None:
        lines.append(f"model: {report.model}")
    return "\n".join(lines)


def _outlook_text(outlook: dict[str, Any]) -> str:
    if outlook.get("finished"):
        return "this run is finished; nothing would be done"
    plan = outlook["plan"]
    lines = [f"{outlook['steps']} steps on {outlook['device']}"]
    if outlook["resume"]:
        lines.append(f"resumes {outlook['resume']}")
    computing = sum(plan["device"].values())
    host = plan["host"] | ({"compute (on the CPU)": computing} if plan["on_cpu"] else {})
    device = "compute, in host memory" if plan["on_cpu"] else "device memory"
    for title, purposes in (("host memory", host), (device, plan["device"])):
        lines.append(f"{title}: {format_size(sum(purposes.values()))}")
        lines += [f"  {purpose:40} {format_size(nbytes):>12}" for purpose, nbytes in purposes.items()]
    return "\n".join(lines)
