"""Files that a run writes in its folder: never through a link, which could lead anywhere, and never into a pipe.

The folder itself may be a link: that is where its owner wants it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from megatrain.errors import UsageError

_HINT = "remove it, or choose another folder with --output-dir"


def open_own(path: Path, flags: int) -> int:
    """`os.open` with the permissions of the umask. Raises UsageError for a link or what is no file, OSError."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError("is no file, and a run is to write there", where=str(path), hint=_HINT)
    return fd


def read_own(path: Path) -> bytes:
    """All of a file; what is none, as a pipe that nobody writes to, is not waited for. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no file", str(path))
    with os.fdopen(fd, "rb") as file:
        return file.read()


def refuse_link(path: Path) -> None:
    """Raises UsageError if `path` is a link."""
    if path.is_symlink():
        raise UsageError(
            f"is a link to {os.readlink(path)}, and a run writes no file through a link", where=str(path), hint=_HINT
        )


def refuse_lost_link(path: Path) -> None:
    """Raises UsageError if `path` is a link that leads nowhere: nothing can be made in its place."""
    if path.is_symlink() and not path.exists():
        hint = f"make what it leads to, or {_HINT}"
        raise UsageError(f"is a link to {os.readlink(path)}, which is not there", where=str(path), hint=hint)


def is_mount(path: Path) -> bool:
    """Whether something is mounted there; also a folder of the same disk, which os.path.ismount does not see."""
    if path.is_symlink():
        return False
    if os.path.ismount(path):
        return True
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # not this kernel
        return False
    points = (re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split()[4]) for line in lines)
    return os.fsencode(os.path.realpath(path)) in points


def refuse_folder_aside(path: Path) -> None:
    """Raises UsageError if a folder has the name under which `write_whole` would write."""
    aside = _aside(path)
    if aside.is_dir() and not aside.is_symlink():
        raise UsageError(f"is a folder, and {path.name} is to be written there first", where=str(aside), hint=_HINT)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, force to the disk and rename: a reader sees the old file or the new one. A link is replaced.

    Raises OSError.
    """
    aside = _aside(path)
    aside.unlink(missing_ok=True)
    try:
        with os.fdopen(open_own(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
