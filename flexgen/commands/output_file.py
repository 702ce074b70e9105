"""Writes the file that a command was asked for."""

from __future__ import annotations

from pathlib import Path

from flexgen.errors import FlexgenError


def write_output(path: Path, text: str) -> None:
    """Write a text, or say why that fails.

    Raises:
        FlexgenError: the file cannot be written.
    """
    write_bytes(path, text.encode(), make_folder=False)


def write_bytes(path: Path, content: bytes, *, make_folder: bool = True) -> None:
    """Write bytes, into a folder that is made where it is missing, or say why that fails.

    Raises:
        FlexgenError: the file cannot be written.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise FlexgenError(
            f"cannot write {path}: {error.strerror}", fix="give -o a file in a directory of your own"
        ) from error
