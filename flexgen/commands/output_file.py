"""Writes the file that a command was asked for."""

from __future__ import annotations

from pathlib import Path

from flexgen.errors import FlexgenError


def write_output(path: Path, text: str) -> None:
    """Write a text, or say why that fails.

    Raises:
        FlexgenError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise FlexgenError(
            f"cannot write {path}: {error.strerror}", fix="give -o a file in a directory of your own"
        ) from error
