"""A content-addressed store of emitted sources on disk, verified at every read, which works from memory if it must."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("flexgen.cache")
MAX_BYTES = 64 << 20  # about three thousand sources
_REFRESH_SECONDS = 3600  # how stale a file's time of last use may become before a hit rewrites it
_KEY = re.compile(r"[0-9A-Za-z_-]{8,128}")
_SEAL = "\n# sha256 "  # the last line of a file: the digest of everything before it


@dataclass(frozen=True, slots=True)
class CachedSource:
    """An emitted source as it lies on disk: `path` holds `text` and a last line with its digest."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a store holds on disk."""

    directory: Path
    entries: int
    total_bytes: int


class SourceCache:
    """Sources by key.

    The directory belongs to the user alone: it is made with mode 0700, and one that another user owns or may write to
    is not used. Where no directory can be used or written, sources go to a private temporary one that lives as long as
    the process, and one warning says so. Any number of threads and processes may share a directory.

    Args:
        directory: where to keep the sources; None for the temporary directory.
        max_bytes: the least recently used files go when there are more bytes than this.
    """

    def __init__(self, directory: Path | None, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._in_memory: dict[str, CachedSource] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._directory = self._open(directory)

    @property
    def directory(self) -> Path:
        return self._directory

    def get(self, key: str, build: Callable[[], str]) -> CachedSource:
        """Return the source stored under `key`, or build and store it; a damaged file is built again.

        `key` must be a digest of everything the text depends on, for two texts never share a key.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a cache key: {key!r}")
        found = self._in_memory.get(key)
        if found is None:
            found = self._read(key)
            _log.debug("emitted source %s %s %s", key, "written to" if found is None else "read from", self._directory)
            found = found or self._write(key, build())
            with self._lock:
                found = self._in_memory.setdefault(key, found)
        return found

    def stats(self) -> CacheStats:
        files = self._files()
        return CacheStats(self._directory, len(files), sum(size for _, size, _ in files))

    def clear(self) -> int:
        """Delete every stored source and return how many there were; loaded modules stay usable."""
        files = self._files()
        for _, _, path in files:
            path.unlink(missing_ok=True)
        self._in_memory.clear()
        return len(files)

    # Reading.

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.py"

    def _read(self, key: str) -> CachedSource | None:
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with open(descriptor, encoding="utf-8", newline="") as file:
                sealed = file.read()
        except (OSError, UnicodeDecodeError):
            return None
        text = _unseal(sealed)
        if text is None:
            path.unlink(missing_ok=True)
            return None
        _touch(path)
        return CachedSource(path, text)

    # Writing.

    def _write(self, key: str, text: str) -> CachedSource:
        try:
            source = self._write_atomically(key, text)
        except OSError as error:
            self._fall_back(f"cannot write to {self._directory}: {error.strerror}")
            return self._write_atomically(key, text)
        self._evict(keep=source.path)
        return source

    def _write_atomically(self, key: str, text: str) -> CachedSource:
        """Write a temporary file and rename it, so that a reader sees all of an entry or none."""
        path = self._path(key)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self._directory)
        try:
            with open(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(_seal(text))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return CachedSource(path, text)

    def _evict(self, keep: Path) -> None:
        """Delete the files used longest ago until the rest fit."""
        files = self._files()
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                excess -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return time of last use, size and path of each file; another process may delete one meanwhile."""
        found = []
        for path in self._directory.glob("*.py"):
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_mtime, status.st_size, path))
        return found

    # Choosing the directory.

    def _open(self, directory: Path | None) -> Path:
        if directory is None:
            return self._temporary_directory()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            complaint = _complaint(directory)
        except OSError as error:
            complaint = f"cannot use {directory}: {error.strerror}"
        if complaint is None:
            return directory.resolve()
        self._warn(complaint)
        return self._temporary_directory()

    def _fall_back(self, complaint: str) -> None:
        """Leave a directory that cannot be written; a second failure is the caller's, for nothing is left to try."""
        if self._temporary is not None:
            return
        self._warn(complaint)
        self._directory = self._temporary_directory()

    def _temporary_directory(self) -> Path:
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="flexgen-")
        return Path(self._temporary.name)

    @staticmethod
    def _warn(complaint: str) -> None:
        warnings.warn(
            f"flexgen keeps no sources between processes: {complaint}. "
            "Set FLEXGEN_CACHE_DIR to a directory of your own.",
            RuntimeWarning,
            stacklevel=4,
        )


def _seal(text: str) -> str:
    return f"{text}{_SEAL}{_digest(text)}\n"


def _unseal(sealed: str) -> str | None:
    """Return the text of a file, or None where the seal is missing or does not match."""
    text, seal, digest = sealed.rpartition(_SEAL)
    return text if seal and digest == _digest(text) + "\n" else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _touch(path: Path) -> None:
    """Record a use, for eviction; not at every use, and not where the file may only be read."""
    try:
        if time.time() - path.stat().st_mtime > _REFRESH_SECONDS:
            os.utime(path)
    except OSError:
        pass


def _complaint(directory: Path) -> str | None:
    """Return why a directory is not the user's own, or None; only POSIX systems can tell."""
    if not hasattr(os, "geteuid"):
        return None
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to {directory}"
    return None
