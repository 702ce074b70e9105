"""How a user names a file and the mods in it: FILE[:name[,name]]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A file, and the names in it that are meant; none for the conventional ones."""

    path: Path
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}:{','.join(self.names)}" if self.names else str(self.path)


def parse_file_spec(text: str) -> FileSpec:
    """Read FILE[:name[,name]]; a colon that belongs to an existing path, or to a drive, stays in it."""
    path, colon, names = text.rpartition(":")
    if not colon or Path(text).exists() or len(path) == 1:
        return FileSpec(Path(text))
    return FileSpec(Path(path), tuple(name.strip() for name in names.split(",") if name.strip()))
