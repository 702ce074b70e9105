"""What was compiled, as files: by kernel a directory, whose groups hold the digest of each of their files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flexgen.runtime.private_directory import read_own_file

FOLDER = "compiled"  # in the directory of emitted sources
GROUP = "__grp__"  # how the name of a group's list begins, as Triton has it
MAX_BYTES = 1 << 30
_REFRESH_SECONDS = 3600  # how stale an entry's time of last use may become before a hit renews it
_EVICTION_SECONDS = 600  # between two looks at how much there is, by whichever process compiles
_MARKER = ".looked"  # its time of change is that of the last look


def list_of(paths: Mapping[str, str]) -> str:
    """Return the text of a group's list: the digest of each of its files, by plain name."""
    return json.dumps({"sha256": {name: _digest(Path(path).read_bytes()) for name, path in paths.items()}})


def intact_group(group: Path) -> dict[str, str] | None:
    """Return the paths of a group's files by name.

    Returns:
        None where there is no list, or a file is missing, changed, cut short, or not the user's own.
    """
    digests = _read_digests(group)
    if digests is None or not all(_is_intact(group.parent / name, digest) for name, digest in digests.items()):
        return None
    _renew(group.parent)
    return {name: str(group.parent / name) for name in digests}


def _read_digests(path: Path) -> dict[str, str] | None:
    """Return the digest of each file of a group by name; None where there is no such list."""
    data = read_own_file(path)
    try:
        digests = json.loads(data)["sha256"] if data is not None else None
    except (ValueError, KeyError, TypeError):
        return None
    is_list = isinstance(digests, dict) and all(name == os.path.basename(name) for name in digests)
    return digests if is_list else None


def _is_intact(path: Path, digest: str) -> bool:
    data = read_own_file(path)
    return data is not None and _digest(data) == digest


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _renew(directory: Path) -> None:
    """Record a use, for eviction; not at every use."""
    try:
        if time.time() - directory.stat().st_mtime > _REFRESH_SECONDS:
            os.utime(directory)
    except OSError:
        pass


@dataclass(frozen=True, slots=True)
class CompiledEntry:
    """What was compiled of one kernel.

    Attributes:
        used: when it was last used, in seconds since the epoch.
    """

    path: Path
    used: float
    size: int

    def is_intact(self) -> bool:
        """Whether every file is what was written."""
        groups = list(self.path.glob(f"{GROUP}*"))
        return bool(groups) and all(intact_group(group) is not None for group in groups)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def compiled_entries(directory: Path) -> list[CompiledEntry]:
    """Return what is kept in a directory of emitted sources, the last used first."""
    found = []
    for path in (directory / FOLDER).glob("*/"):
        try:
            size, used = sum(file.stat().st_size for file in path.iterdir()), path.stat().st_mtime
        except OSError:  # another process deletes it
            continue
        found.append(CompiledEntry(path, used, size))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def evict_compiled(directory: Path, max_bytes: int = MAX_BYTES) -> int:
    """Delete what was used longest ago until the rest fits; return how many entries went."""
    room, gone = max_bytes, 0
    for entry in compiled_entries(directory):
        room -= entry.size
        if room < 0:
            entry.delete()
            gone += 1
    return gone


def evict_now_and_then(directory: Path) -> None:
    """Keep what is compiled within its bounds, without looking at each compilation."""
    marker = directory / FOLDER / _MARKER
    try:
        if marker.exists() and time.time() - marker.stat().st_mtime < _EVICTION_SECONDS:
            return
        marker.touch(mode=0o600)
    except OSError:
        return
    evict_compiled(directory)
