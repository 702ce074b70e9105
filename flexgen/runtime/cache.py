"""A store of emitted sources on disk, each verified at every read, which works from memory if it must."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

from flexgen.runtime.environment import read_environment
from flexgen.runtime.private_directory import make_private, read_own_file, write_own_file

_log = logging.getLogger("flexgen.cache")
MAX_BYTES = 64 << 20  # about three thousand sources
KEPT_SHARE = 0.9  # of that, after older files had to go: so that the next ones fit
_WRITES_BETWEEN_LOOKS = 256  # at what other processes wrote
_REFRESH_SECONDS = 3600  # how stale a file's time of last use may become before a hit rewrites it
_ABANDONED_SECONDS = 3600  # after which a temporary file is that of a process that was killed
_KEY = re.compile(r"[0-9A-Za-z_-]{8,128}")
_SEAL = "\n# sha256 "  # the last line of a file: the digest of everything before it


@dataclass(frozen=True, slots=True)
class CachedSource:
    """An emitted source: `path` holds `text` and a last line with its digest, unless nothing could be written."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file of the store, as it was found.

    Attributes:
        used: when it was last used, in seconds since the epoch.
        text: None where the file is damaged, or not the user's own.
    """

    key: str
    path: Path
    used: float
    size: int
    text: str | None


class SourceCache:
    """Sources by key, as files that tracebacks and profilers can point at.

    What runs is never read from there: a file that does not hold the very text that was emitted is written again.

    The directory belongs to the user alone: it is made with mode 0700, and one that another user owns or may write to
    is not used. Where no directory can be used or written, sources go to a private temporary one that lives as long as
    the process, or else stay in memory, and one warning says so. Any number of threads and processes may share a
    directory, and any of them may be killed at any moment.

    Args:
        directory: where to keep the sources; None for the temporary directory.
        max_bytes: the least recently used files go when there are more bytes than this.
    """

    def __init__(self, directory: Path | None, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._in_memory: dict[str, CachedSource] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._has_left = False  # the directory that was asked for
        self._room: int | None = None  # bytes that may be written before looking at what is there; None: look now
        self._writes = 0
        self._directory = self._open(directory)
        _caches.add(self)

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def is_temporary(self) -> bool:
        """Whether what is kept goes with the process."""
        return self._temporary is not None or self._has_left

    def keep(self, key: str, text: str) -> CachedSource:
        """Keep a text under its key, and return it.

        `key` must be a digest of everything the text depends on, for two texts never share a key.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a cache key: {key!r}")
        found = self._in_memory.get(key)
        if found is None:
            found = self._on_disk(key, text)
            with self._lock:
                found = self._in_memory.setdefault(key, found)
        return found

    def entries(self) -> list[CacheEntry]:
        """Return every file of the store, the last used first."""
        found = [_entry(*file) for file in sorted(self._files(), reverse=True)]
        return [entry for entry in found if entry is not None]

    def clear(self) -> int:
        """Delete every stored source and return how many there were; loaded modules stay usable."""
        files = self._files()
        for _, _, path in files:
            path.unlink(missing_ok=True)
        self._in_memory.clear()
        return len(files)

    def prune(self) -> int:
        """Delete what is damaged, what killed processes left, and the oldest of what is too much.

        Returns:
            How many files went.
        """
        before = len(self._files()) + len(self._abandoned())
        for entry in self.entries():
            if entry.text is None:
                entry.path.unlink(missing_ok=True)
        self._evict(keep=None)
        return before - len(self._files())

    # Reading and writing.

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.py"

    def _on_disk(self, key: str, text: str) -> CachedSource:
        path = self._path(key)
        if _unseal(read_own_file(path)) == text:
            _log.debug("emitted source %s found in %s", key, self._directory)
            _touch(path)
            return CachedSource(path, text)
        _log.debug("emitted source %s written to %s", key, self._directory)
        return self._write(key, text)

    def _write(self, key: str, text: str) -> CachedSource:
        sealed = _seal(text)
        for _ in range(2):
            path = self._path(key)
            try:
                write_own_file(path, sealed)
            except OSError as error:
                if _unseal(read_own_file(path)) == text:  # over a network, a rename may succeed and tell an error
                    return CachedSource(path, text)
                self._leave(f"cannot write to {self._directory}: {error.strerror}")
            else:
                self._make_room(len(sealed), keep=path)
                return CachedSource(path, text)
        return CachedSource(self._path(key), text)

    def _make_room(self, written: int, keep: Path) -> None:
        """Look at what is there when what was written since the last look may be too much, and now and then."""
        with self._lock:
            self._writes += 1
            if self._room is not None:
                self._room -= written
                if self._room >= 0 and self._writes < _WRITES_BETWEEN_LOOKS:
                    return
            self._writes = 0
            self._room = self._max_bytes - self._evict(keep)

    def _evict(self, keep: Path | None) -> int:
        """Delete the files used longest ago until the rest fit, and return the bytes that are left."""
        for path in self._abandoned():
            path.unlink(missing_ok=True)
        files = self._files()
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes:
            return total
        for _, size, path in sorted(files):
            if total <= KEPT_SHARE * self._max_bytes:
                break
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
        return total

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return time of last use, size and path of each file."""
        return _listed(self._directory, ".py")

    def _abandoned(self) -> list[Path]:
        """Return temporary files of processes that were killed while they wrote."""
        old = time.time() - _ABANDONED_SECONDS
        return [path for used, _, path in _listed(self._directory, ".tmp") if used < old]

    # Choosing the directory.

    def _open(self, directory: Path | None) -> Path:
        if directory is None:
            return self._temporary_directory()
        refusal = make_private(directory)
        if refusal is None:
            return directory.resolve()
        self._warn(refusal)
        return self._temporary_directory()

    def _leave(self, why: str) -> None:
        """Leave a directory that cannot be written for a temporary one; from there, there is nowhere to go."""
        with self._lock:
            if not self.is_temporary:
                self._warn(why)
                self._has_left = True
                self._directory = self._temporary_directory()

    def _temporary_directory(self) -> Path:
        try:
            self._temporary = tempfile.TemporaryDirectory(prefix="flexgen-", ignore_cleanup_errors=True)
        except OSError:  # no place at all: paths then name files that do not exist
            return Path("<flexgen>")
        return Path(self._temporary.name)

    def forget_temporary_directory(self) -> None:
        """Leave the temporary directory to the process that made it: this one was forked from that."""
        if self._temporary is not None:
            self._temporary._finalizer.detach()  # type: ignore[attr-defined]
        self._lock = threading.Lock()  # another thread of that process may have held it

    @staticmethod
    def _warn(complaint: str) -> None:
        warnings.warn(
            f"flexgen keeps no sources between processes: {complaint}. "
            "Set FLEXGEN_CACHE_DIR to a directory of your own.",
            RuntimeWarning,
            stacklevel=4,
        )


@functools.cache
def source_cache() -> SourceCache:
    """Return the process's store of emitted sources."""
    return SourceCache(read_environment().cache_dir)


_caches: weakref.WeakSet[SourceCache] = weakref.WeakSet()


def _in_forked_process() -> None:
    for cache in list(_caches):
        cache.forget_temporary_directory()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_process)


def _listed(directory: Path, suffix: str) -> list[tuple[float, int, Path]]:
    """Return time of last use, size and path of files; another process may delete one meanwhile."""
    found = []
    try:
        with os.scandir(directory) as items:
            for item in items:
                if item.name.endswith(suffix):
                    try:
                        status = item.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    found.append((status.st_mtime, status.st_size, Path(item.path)))
    except OSError:
        return []
    return found


def _entry(used: float, size: int, path: Path) -> CacheEntry | None:
    return CacheEntry(path.stem, path, used, size, _unseal(read_own_file(path)))


def _seal(text: str) -> bytes:
    data = text.encode()
    return data + f"{_SEAL}{hashlib.sha256(data).hexdigest()}\n".encode()


def _unseal(sealed: bytes | None) -> str | None:
    """Return the text of a file, or None where there is none, or the seal is missing or does not match."""
    if sealed is None:
        return None
    data, seal, digest = sealed.rpartition(_SEAL.encode())
    if not seal or digest != hashlib.sha256(data).hexdigest().encode() + b"\n":
        return None
    return data.decode()


def _touch(path: Path) -> None:
    """Record a use, for eviction; not at every use, and not where the file may only be read."""
    try:
        if time.time() - path.stat().st_mtime > _REFRESH_SECONDS:
            os.utime(path)
    except OSError:
        pass
