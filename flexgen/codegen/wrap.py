"""Breaks long statements of emitted text at the commas of their outermost call."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 110


def wrap_line(line: str) -> list[str]:
    """Return a line, broken at call arguments if it is code longer than WIDTH and has any."""
    if len(line) <= WIDTH or line.lstrip().startswith(("#", '"""')):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    opening = _outermost_call(line)
    if opening is None:
        return [f"{indent}{row}," for row in _rows(_arguments(line), WIDTH - len(indent))] or [line]
    closing = _matching(line, opening)
    assert closing is not None
    args = _split(line[opening + 1 : closing])
    inner = [piece for row in _rows(args, WIDTH - len(indent) - 4) for piece in wrap_line(f"{indent}    {row},")]
    return [line[: opening + 1], *inner, *wrap_line(f"{indent}{line[closing:]}")]


def _arguments(line: str) -> list[str]:
    """Return the arguments on a line of a call that stands on several lines; none if the line is anything else."""
    text = line.strip()
    whole = text.endswith(",") and text.count("(") == text.count(")")
    return _split(text[:-1]) if whole else []


def _rows(args: list[str], width: int) -> list[str]:
    """Fill lines with positional arguments; a keyword argument has a line of its own."""
    rows: list[str] = []
    fill = False
    for arg in args:
        keyword = "=" in arg.split("(")[0].split("[")[0]
        if fill and not keyword and len(rows[-1]) + len(arg) + 2 < width:
            rows[-1] += f", {arg}"
        else:
            rows.append(arg)
        fill = not keyword
    return rows


def _outermost_call(line: str) -> int | None:
    """Return where the longest call's bracket opens, among those not inside another."""
    best: tuple[int, int] | None = None
    position = 0
    while (position := line.find("(", position)) >= 0:
        end = _matching(line, position)
        if end is None:  # the line is a piece of one that was broken already
            return None
        is_call = position > 0 and (line[position - 1].isalnum() or line[position - 1] == "_")
        if is_call and (best is None or end - position > best[1] - best[0]):
            best = (position, end)
        position = end
    return best[0] if best and best[1] - best[0] > 20 else None


def _matching(line: str, opening: int) -> int | None:
    """Return where the bracket at `opening` closes; None in a piece of a line that was broken already."""
    depth = 0
    for position, char in _outside_strings(line, opening):
        depth += (char in "([") - (char in ")]")
        if depth == 0:
            return position
    return None


def _split(args: str) -> list[str]:
    pieces, depth, start = [], 0, 0
    for position, char in _outside_strings(args, 0):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            pieces.append(args[start:position].strip())
            start = position + 1
    pieces.append(args[start:].strip())
    return [piece for piece in pieces if piece]


def _outside_strings(text: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield (position, character) of what is not inside a string literal."""
    quote = ""
    for position in range(start, len(text)):
        char = text[position]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            yield position, char
