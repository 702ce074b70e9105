"""Triton's digest of its own files, which is part of every key in its cache, remembered between processes.

Triton reads all of its compiler to compute it, some hundred megabytes, once in each process: a third of a second. It is
kept with the size and the times of each of those files, and is computed again when one of them is not what it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import triton
from triton.runtime import cache as triton_cache

from flexgen.runtime.private_directory import read_own_file, write_own_file

_FOLDERS = ("_C", "backends", "compiler", "language", "runtime")  # more than Triton looks at


def remember_digest(directory: Path) -> None:
    """Spare this process Triton's look at its own files, if a process before it has looked and they are the same.

    Args:
        directory: the user's own; where nothing can be written there, nothing is remembered.
    """
    compute = getattr(triton_cache, "triton_key", None)
    if compute is None or not hasattr(compute, "cache_info"):  # another version of Triton, or remembered before
        return
    package = Path(triton.__file__).resolve().parent
    path, stamp = directory / f"triton-{_short(str(package))}.json", _stamp(package)
    digest = _remembered(path, stamp)
    if digest is None:
        digest = compute()
        with suppress(OSError):
            write_own_file(path, json.dumps({"stamp": stamp, "digest": digest}).encode())
    vars(triton_cache)["triton_key"] = lambda: digest


def _remembered(path: Path, stamp: str) -> str | None:
    data = read_own_file(path)
    try:
        found = json.loads(data) if data is not None else {}
        digest = found["digest"] if found["stamp"] == stamp else None
    except (ValueError, KeyError, TypeError):
        return None
    return digest if isinstance(digest, str) else None


def _stamp(package: Path) -> str:
    """Return a digest of the names, sizes and times of Triton's files."""
    lines = [line for folder in _FOLDERS for line in sorted(_described(package / folder))]
    return _short("\n".join([triton.__version__, *lines]))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _described(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=True):
                if entry.name not in ("__pycache__", "include"):
                    yield from _described(Path(entry.path))
            elif entry.name.endswith((".py", ".so", ".pyd")):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
