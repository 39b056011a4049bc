"""``megatrain export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from megatrain.cli.output import emit
from megatrain.errors import UsageError
from megatrain.report.console import open_console
from megatrain.train.signals import Interrupted, SignalGuard
from megatrain.units import format_size


def run(checkpoint: Path, *, out: Path, dtype: str, json: bool) -> int:
    """Write `out`; returns the exit code."""
    with SignalGuard() as signals:
        try:
            from megatrain.train.export import Dtype, export_checkpoint

            known = get_args(Dtype)
            if dtype not in known:
                raise UsageError(f"`{dtype}` is none of {', '.join(known)}", where="--dtype")
            console = open_console(quiet=False)
            try:
                done = export_checkpoint(
                    checkpoint,
                    out=out,
                    dtype=dtype,  # type: ignore[arg-type]  # one of `known`
                    console=console,
                    check=signals.stop.check,
                )
            finally:
                console.close()
        except Interrupted as interrupt:
            signals.stop.handled()
            print(f"interrupted by {interrupt}; {out} is as it was", file=sys.stderr)
            if json:
                emit({"status": "interrupted", "exit_code": interrupt.exit_code})
            return interrupt.exit_code
    exported = done.exported
    if json:
        emit(
            {
                "status": "done",
                "exit_code": 0,
                "model": str(exported.folder),
                "checkpoint": str(done.checkpoint),
                "step": done.step,
                "dtype": exported.dtype,
                "total_bytes": exported.total_bytes,
                "shards": exported.shards,
            }
        )
    else:
        print(
            f"model: {exported.folder} ({format_size(exported.total_bytes)}, {exported.dtype}, after step {done.step})"
        )
    return 0
