"""Everything a person can cause, as one family of exceptions.

The command line turns each into one message (what, where, ``hint:``) and the exit code of its class;
anything else that escapes is a bug of ours and ends in ``crash.txt``.
"""

from __future__ import annotations

import errno
from typing import ClassVar

DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE})
"""The `errno` of an OSError that is the disk's fault and not a bug of ours."""


def addressed(message: str, *, where: str | None) -> str:
    """Where and what. A key that ends the one and begins the other is said once: `--set optimizer.lr: must be ...`."""
    if not where:
        return message
    last = where.rpartition(" ")[2]
    return f"{where}: {message.removeprefix(f'{last}: ')}"


class MegatrainError(Exception):
    """A failure with an address: what is wrong, where, and what to do about it."""

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where  # file:line, row number, parameter or key

    def __str__(self) -> str:
        head = addressed(self.message, where=self.where)
        return f"{head}\nhint: {self.hint}" if self.hint else head


class RecipeError(MegatrainError):
    """The recipe, or an override of it, cannot be used."""

    exit_code = 2
    kind = "recipe"


class UsageError(MegatrainError):
    """The command was called in a way that cannot work (output folder in use, wrong argument)."""

    exit_code = 2
    kind = "usage"


class DataError(MegatrainError):
    """A dataset, a row or a chat template that cannot be used."""

    exit_code = 2
    kind = "data"


class ModelError(MegatrainError):
    """A model that cannot be had, read, or run exactly."""

    exit_code = 2
    kind = "model"


class NotAvailable(MegatrainError):
    """A feature of the contract that this version does not have yet."""

    exit_code = 2
    kind = "not_available"


class DoesNotFit(MegatrainError):
    """The run needs more memory or disk than there is."""

    exit_code = 3
    kind = "does_not_fit"


class DeviceError(MegatrainError):
    """The accelerator, its driver, or page-locking is not usable."""

    exit_code = 3
    kind = "device"


class DiskError(MegatrainError):
    """The disk is full, read-only or gone."""

    exit_code = 3
    kind = "disk"


class NonFinite(MegatrainError):
    """Training became non-finite and the recipe says stop."""

    exit_code = 4
    kind = "nonfinite"


class VerifyFailed(MegatrainError):
    """Streamed and resident training differ."""

    exit_code = 5
    kind = "verify"
