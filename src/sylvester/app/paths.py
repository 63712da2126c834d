"""Paths that users name: what may be read, what may be written, and what no path can be."""

from __future__ import annotations

import os
import stat
import tempfile
from io import BufferedReader
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class PathError(ValueError):
    """Why a path cannot be used; the message completes a sentence that ends in "got"."""


def usable(path: Path) -> Path:
    """The path, unless it could not be written into the run's settings and printed."""
    text = str(path)
    if "\0" in text:
        raise PathError(f"{text!r}, with a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PathError(f"{text!r}, which is not UTF-8") from None
    return path


def open_regular(path: Path) -> BufferedReader:
    """The regular file at ``path`` for reading. Nothing else is waited for: opening a pipe could take for ever."""
    if "\0" in str(path):
        raise PathError("a path with a NUL character")
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _require_regular(os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def destination(path: Path) -> Path:
    """Where a file written to ``path`` goes, links followed; a device, a pipe or a folder is not replaced by one."""
    usable(path)
    real = Path(os.path.realpath(path))
    try:
        _require_regular(real.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if not real.parent.is_dir():
            raise PathError(f"{path} in {real.parent}, which is no folder") from None
    except PermissionError:  # to look into the folder, let alone to write there
        pass
    except PathError as error:
        raise PathError(f"{path}, {error}") from None
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise PathError(f"{path} in {real.parent}, where nothing may be written")
    return real


def folder(path: Path) -> Path:
    """A folder that is there or can be made, with all above it."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.lexists(parent))
    new = there != path.absolute()
    if not there.is_dir():
        raise PathError(f"{path} below the file {there}" if new else f"the file {path}")
    if not os.access(there, os.W_OK | os.X_OK) or (new and not _takes_files(there)):
        raise PathError(f"{path} in {there}, where nothing may be written")
    return path


def _takes_files(folder: Path) -> bool:
    """Tried out, without a name where the system can: the superuser may write into /proc, and yet cannot."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise PathError(_KINDS.get(stat.S_IFMT(mode), "something else than a file"))
