"""How a command ends: results on stdout, everything else on stderr, one exit code, and with --json one object."""

from __future__ import annotations

import json as json_format
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from megatrain.errors import DISK_FAULTS, DiskError, DoesNotFit, MegatrainError, UsageError, addressed
from megatrain.files import write_whole
from megatrain.report.console import colours

INTERRUPTED = 130
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_BROKEN_PIPE = 141


@dataclass
class Guard:
    """What `guarded` needs to know from the command it guards."""

    crash_dir: Path | None = None  # set once the command owns a folder; where crash.txt goes


@contextmanager
def guarded(*, json: bool) -> Iterator[Guard]:
    """Turns every failure of the block into a message, a hint and an exit code (typer.Exit).

    With `json` the last line of stdout is an error object. What is neither a MegatrainError nor an interruption is a
    bug of ours: its traceback goes to ``crash.txt`` and one line to stderr.
    """
    guard = Guard()
    try:
        yield guard
        if sys.stdout is not None:  # it may have been closed before we came
            sys.stdout.flush()
    except MegatrainError as error:
        _fail(error, json=json)
    except KeyboardInterrupt:
        _fail_with(INTERRUPTED, kind="interrupted", message="interrupted", json=json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BROKEN_PIPE) from None
    except MemoryError as error:
        _fail(DoesNotFit(f"host memory is exhausted: {error}".removesuffix(": ")), json=json)
    except OSError as error:
        if error.errno in DISK_FAULTS:
            _fail(DiskError(error.strerror or "the disk is full", where=str(error.filename or "")), json=json)
        _crashed(error, guard=guard, json=json)
    except typer.Exit:
        raise
    except Exception as error:
        _crashed(error, guard=guard, json=json)


def emit(result: Mapping[str, Any]) -> None:
    """`result` as the one JSON line of stdout. Numbers that are not finite are a bug (ValueError).

    Half a surrogate pair, as in a file's name that is no UTF-8, stays JSON's escape of it.
    """
    text = json_format.dumps(result, allow_nan=False, ensure_ascii=False)
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)


def harmless(text: str) -> str:
    """`text` for a terminal: control characters, which a row or a file's name may hold, as escapes."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def error_object(error: MegatrainError) -> dict[str, Any]:
    """The JSON form of a failure."""
    return _object(error.exit_code, kind=error.kind, message=error.message, hint=error.hint, where=error.where)


def print_error(error: MegatrainError) -> None:
    """The message and its hint on stderr."""
    _print_message(addressed(error.message, where=error.where), hint=error.hint)


def usage_failure(message: str, *, json: bool) -> int:
    """Reports a command line that cannot be read; returns its exit code."""
    error = UsageError(message, hint="`megatrain --help` lists the commands, `megatrain COMMAND --help` the options")
    print_error(error)
    if json:
        emit(error_object(error))
    return error.exit_code


def help_if_alone(context: typer.Context) -> None:
    """For a group called without a command: its help, and the exit code of a usage error."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


def _object(code: int, *, kind: str, message: str, hint: str | None, where: str | None) -> dict[str, Any]:
    error = {"kind": kind, "message": message, "hint": hint, "where": where}
    return {"status": "error", "exit_code": code, "error": error}


def _print_message(message: str, *, hint: str | None) -> None:
    coloured = colours(sys.stderr)
    print(f"{_paint('error', code='1;31', coloured=coloured)}: {harmless(message)}", file=sys.stderr)
    if hint:
        print(f"{_paint('hint', code='1;36', coloured=coloured)}: {harmless(hint)}", file=sys.stderr)
    sys.stderr.flush()


def _paint(text: str, *, code: str, coloured: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if coloured else text


def _emit_failure(result: Mapping[str, Any]) -> None:
    """Where stdout takes nothing either, the exit code and stderr have said it."""
    try:
        emit(result)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more


def _fail(error: MegatrainError, *, json: bool) -> NoReturn:
    print_error(error)
    if json:
        _emit_failure(error_object(error))
    raise typer.Exit(error.exit_code) from error


def _fail_with(code: int, *, kind: str, message: str, json: bool) -> NoReturn:
    _print_message(message, hint=None)
    if json:
        _emit_failure(_object(code, kind=kind, message=message, hint=None, where=None))
    raise typer.Exit(code) from None


def _crashed(error: Exception, *, guard: Guard, json: bool) -> NoReturn:
    text = "".join(traceback.format_exception(error))
    path = _write_crash(text, folder=guard.crash_dir)
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    message = f"a bug of megatrain: {summary[:300]}"
    where = str(path) if path is not None else None
    _print_message(f"{message} (traceback in {where})" if where else f"{message}\n{text}", hint=None)
    if json:
        _emit_failure(_object(MegatrainError.exit_code, kind="internal", message=message, hint=None, where=where))
    raise typer.Exit(MegatrainError.exit_code) from error


def _write_crash(text: str, *, folder: Path | None) -> Path | None:
    """The file written, in `folder` or else among the temporary files; None where neither can be written."""
    for directory in (folder, Path(tempfile.gettempdir())):
        if directory is None:
            continue
        path = directory / "crash.txt" if directory == folder else directory / f"megatrain-crash-{os.getpid()}.txt"
        try:
            write_whole(path, text.encode(errors="replace"))
        except OSError:
            continue
        return path
    return None
