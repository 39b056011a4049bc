"""Words that nothing may depend on."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, TextIO, cast


class _Lasting:
    """A stream that loses words where the one behind it takes none, and never fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO | None) -> TextIO:
    """`stream`, for words that nothing may depend on: a full disk or a closed pipe behind a log ends no run."""
    if stream is None:  # it was closed before we began
        stream = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
    return stream if isinstance(stream, _Lasting) else cast(TextIO, _Lasting(stream))
