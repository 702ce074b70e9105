"""Locks between processes: one of them works, the others wait for it and find its result."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: every process works for itself
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

LOCKS = "locks"  # in the directory of emitted sources
_LONGEST_PAUSE = 0.05  # seconds between two looks at a lock that is held


@contextmanager
def only_one(path: Path, patience: float) -> Iterator[bool]:
    """Hold the lock of a file for the length of the body.

    The operating system lets go of it when the process ends, in whatever way. Where there are no locks (some network
    file systems), or the one who holds it takes longer than `patience` seconds, the body runs without it: what it
    guards is work that would be done twice, never a result.

    Yields:
        Whether the lock is held.
    """
    if not _HAS_LOCKS:
        yield False
        return
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _acquired(descriptor, time.monotonic() + patience)
    finally:
        os.close(descriptor)


def _acquired(descriptor: int, deadline: float) -> bool:
    pause = 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR) or time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        else:
            return True
