"""Where Triton keeps what it compiles for flexgen: beside the emitted sources, each file verified before it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from flexgen.runtime.compiled_files import FOLDER, GROUP, evict_now_and_then, intact_group, list_of
from flexgen.runtime.environment import read_environment
from flexgen.runtime.private_directory import make_private


class VerifiedCache(FileCacheManager):  # type: ignore[misc]
    """Triton's file cache with groups that hold the digest of each file, and no path.

    A group that is not intact is no group: Triton then compiles again and replaces it.
    """

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        path: str = super().put(data, filename, binary)
        os.chmod(path, 0o600)  # whatever the user's mask: what others may change is not read back
        return path

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        return self.put(list_of(group), f"{GROUP}{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        return intact_group(Path(self.cache_dir) / f"{GROUP}{filename}")


@contextmanager
def compiling_into(directory: Path | None) -> Iterator[None]:
    """Let Triton keep what it compiles in a directory, verified; where users chose Triton's cache themselves, there.

    Args:
        directory: of emitted sources; None leaves Triton its own.
    """
    if directory is None or _is_chosen() or make_private(own := directory / FOLDER) is not None:
        yield
        return
    with cache_of_triton(own, VerifiedCache):
        yield
    evict_now_and_then(directory)


@contextmanager
def cache_of_triton(directory: Path, manager: type[FileCacheManager] | None = None) -> Iterator[None]:
    """Let Triton keep what it compiles in a directory.

    An assignment to a knob would also set the environment variable of its name, for a process that another thread
    starts meanwhile to take for the user's choice.
    """
    values = vars(knobs.cache)  # what a knob has before its environment variable
    before = dict(values)
    values.update(dir=str(directory), manager_class=manager)
    try:
        yield
    finally:
        values.clear()
        values.update(before)


def _is_chosen() -> bool:
    """Whether Triton's cache is not its usual one: the user's choice, or none at all for the moment."""
    is_usual = knobs.cache.manager_class is None and knobs.cache.dir == knobs.cache.get_triton_dir("cache")
    return not is_usual or read_environment().triton_cache_is_chosen
