"""Breaks what is still too long for a line of a module: comments, docstrings, and arguments that are long sums."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from flexgen.codegen.wrap import wrap_line

WIDTH = 120
_OPERATORS = re.compile(r" (?=[&+|] )")


def fit(line: str) -> Iterator[str]:
    """Yield the pieces of a line; one that fits, or that cannot be broken, is left as it is."""
    if len(line) <= WIDTH:
        yield line
        return
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("#"):
        text = line.lstrip().removeprefix("#").strip()
        yield from textwrap.wrap(
            text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#     ", break_long_words=False
        )
        return
    if line.lstrip().startswith('"""') and line.count('"""') == 1:
        yield from textwrap.wrap(line.strip(), WIDTH, initial_indent=indent, subsequent_indent=indent)
        return
    for piece in wrap_line(line):
        yield from _at_operators(piece) if len(piece) > WIDTH else [piece]


def _at_operators(line: str) -> Iterator[str]:
    """Break an argument of a call at its operators, where Python reads on until the bracket closes."""
    if not line.endswith(","):
        yield line
        return
    indent = " " * (len(line) - len(line.lstrip()))
    held = ""
    for part in _OPERATORS.split(line):
        if held and len(held) + len(part) + 1 > WIDTH:
            yield held
            held = f"{indent}    {part}"
        else:
            held = f"{held} {part}" if held else part
    yield held
