"""Directories and files that nobody else can change: what a cache of things that are executed must lie in."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(directory: Path) -> str | None:
    """Make a directory that is the user's alone, with mode 0700, if there is none.

    Returns:
        Why the one that is there, or that cannot be made, must not be used; None where it may.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return complaint(directory)
    except OSError as error:
        return f"cannot use {directory}: {error.strerror}"


def complaint(directory: Path) -> str | None:
    """Return why a directory is not the user's own, or None; only POSIX systems can tell.

    One whose own mode is right can still be moved away and replaced by whoever may write to a directory above it.
    """
    if not hasattr(os, "geteuid"):
        return None
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to another user"
    if status.st_mode & _OTHERS_WRITE:
        return f"other users may write to {directory}"
    for above in directory.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"other users may write to {above}, and so replace {directory}"
    return None


def read_own_file(path: Path) -> bytes | None:
    """Return what a file of the user's own holds.

    Returns:
        None where there is none, where it is a link or no regular file, or where another user owns or may change it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            return file.read() if _is_own(os.fstat(descriptor)) else None
    except OSError:
        return None


def write_own_file(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that a reader sees all of an entry or none."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)  # with mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _is_own(status: os.stat_result) -> bool:
    if not stat.S_ISREG(status.st_mode):
        return False
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE)
