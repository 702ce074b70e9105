"""What tells one compilation from another without Triton, and which are known to be done."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from flexgen.runtime.arguments import TypedArg
from flexgen.runtime.file_lock import LOCKS
from flexgen.runtime.private_directory import read_own_file


def compile_key(
    module: str,
    entry: str,
    arg_types: Sequence[TypedArg],
    target: str,
    options: Mapping[str, object],
    divisible: Collection[int],
) -> str:
    """Return 32 hexadecimal digits that are the same, in every process, for the same compilation.

    Args:
        module: the module's name, which is one of its text.
    """
    types = [arg.type for arg in arg_types]
    what = (module, entry, types, target, sorted(options.items()), sorted(divisible))
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


def lock_of(directory: Path, key: str) -> Path:
    """Return the file that whoever compiles locks; afterwards it says where the result lies.

    Args:
        directory: of emitted sources.
    """
    return directory / LOCKS / f"{key}.lock"


def note_compiled(lock: Path, place: Path) -> None:
    """Say in a lock's file where the result lies."""
    text = os.fsencode(place)
    if read_own_file(lock) != text:
        with suppress(OSError):
            lock.write_bytes(text)


def is_compiled(directory: Path, key: str) -> bool:
    """Whether a compilation was done and what it made is still there.

    A wrong answer, as after an update of Triton, costs time and nothing else.
    """
    place = read_own_file(lock_of(directory, key))
    return bool(place) and os.path.isdir(os.fsdecode(place or b""))
