"""Keeps what a search found on disk, by device and problem."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flexgen.tuning.settings import Settings

FOLDER = "tuned"  # in the directory of emitted sources


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best settings of a problem on a device.

    Attributes:
        milliseconds, usual_milliseconds: of a call with them, and as flexgen decides by itself.
        date: when they were found.
    """

    settings: Settings
    milliseconds: float
    usual_milliseconds: float
    date: str


class TunedStore:
    """Files in a directory, one a problem.

    Args:
        directory: made when something is stored.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> Tuned | None:
        """Return what is stored; None where nothing is, or what cannot be read."""
        try:
            found = json.loads(self._path(key).read_text(encoding="utf-8"))
            settings = {str(name): value for name, value in found["settings"].items()}
            return Tuned(settings, float(found["ms"]), float(found["usual_ms"]), str(found["date"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, key: str, settings: Settings, milliseconds: float, usual_milliseconds: float) -> Tuned:
        """Store and return; where the directory cannot be written, nothing is kept."""
        tuned = Tuned(dict(settings), milliseconds, usual_milliseconds, time.strftime("%Y-%m-%d"))
        found = {"settings": settings, "ms": milliseconds, "usual_ms": usual_milliseconds, "date": tuned.date}
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._directory)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
            os.replace(name, self._path(key))
        return tuned

    def clear(self) -> int:
        """Delete everything stored, and return how many problems that were."""
        files = self.files()
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def files(self) -> list[Path]:
        """Return the file of each problem."""
        return sorted(self._directory.glob("*.json"))

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"


def tuned_key(kernels: Iterable[str], device: str, versions: str, shape: Iterable[object]) -> str:
    """Return the key of a problem on a device.

    Args:
        kernels: keys of the kernels that flexgen emits by itself: digests of mods, problem, options and flexgen.
        device: its name.
        versions: of Triton, whose code the times are of.
        shape: sizes of the call. What captured tensors hold is not part of it.
    """
    parts = [*kernels, device, versions, *map(str, shape)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
