"""Says in an error about an emitted line where that line comes from: a template, or the user's mod."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen.codegen.source import LineOrigin
from flexgen.errors import SourceSpan


def with_origin(why: str | None, where: SourceSpan | None, line_map: Sequence[LineOrigin]) -> str | None:
    """Return an error's reason with the origin of its emitted line added, if that is known.

    Args:
        where: a place in the emitted module.
        line_map: of that module, one entry for each line.
    """
    if where is None or not 0 < where.line <= len(line_map):
        return why
    told = f"the line comes from {line_map[where.line - 1]}"
    return f"{why}; {told}" if why else told
