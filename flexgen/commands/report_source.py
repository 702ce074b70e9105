"""The emitted source and the user's for the report: coloured pieces of text, and which lines belong together."""

from __future__ import annotations

import builtins
import io
import keyword
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flexgen.codegen.source import KernelSource, LineOrigin, Written

PieceKind = Literal["", "comment", "string", "keyword", "number", "name", "builtin"]

_BUILTINS = frozenset(dir(builtins)) | {"tl", "triton"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a line and what it is, for its colour."""

    text: str
    kind: PieceKind = ""


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a source.

    Attributes:
        number: counted from 1.
        link: the anchor of the line it belongs to on the other side; "" for none.
        origin: what it came from, in words; "" for the user's own lines.
        spills: how many loads and stores of local memory its machine code has.
    """

    number: int
    pieces: tuple[Piece, ...]
    link: str = ""
    origin: str = ""
    spills: int = 0


@dataclass(frozen=True, slots=True)
class SourceView:
    """A source.

    Attributes:
        anchor: the start of its lines' anchors.
        title: as the reader knows it: a kernel's name, or a file's.
    """

    anchor: str
    title: str
    lines: tuple[SourceLine, ...]


def source_views(
    sources: Mapping[str, KernelSource], spilled: Mapping[str, Mapping[int, int]]
) -> tuple[tuple[SourceView, ...], tuple[SourceView, ...]]:
    """Return the emitted sources, and the user's files that their lines came from.

    Args:
        spilled: of the kernels that were compiled, how many loads and stores of local memory each line has.
    """
    files = sorted({one.file for source in sources.values() for one in source.line_map if one.written is Written.USER})
    readable = {file: text for file in files if (text := _text_of(file)) is not None}
    anchors = {file: f"user{number}" for number, file in enumerate(readable)}
    emitted = tuple(_emitted(name, source, anchors, spilled.get(name, {})) for name, source in sources.items())
    return emitted, tuple(_users(file, text, anchors[file], sources) for file, text in readable.items())


def _text_of(file: str) -> str | None:
    """Return a file's text; None where there is no such file any more, as for code that was typed in."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _emitted(name: str, source: KernelSource, anchors: dict[str, str], spilled: Mapping[int, int]) -> SourceView:
    origins = {origin.emitted: origin for origin in source.line_map}
    lines = tuple(
        SourceLine(
            number, pieces, _link(origins.get(number), anchors), _words(origins.get(number)), spilled.get(number, 0)
        )
        for number, pieces in enumerate(coloured(source.text), 1)
    )
    return SourceView(name, name, lines)


def _link(origin: LineOrigin | None, anchors: dict[str, str]) -> str:
    if origin is None or origin.written is not Written.USER or origin.file not in anchors:
        return ""
    return f"{anchors[origin.file]}-{origin.line}"


def _words(origin: LineOrigin | None) -> str:
    if origin is None:
        return ""
    if origin.written is Written.USER:
        return f"from line {origin.line} of {Path(origin.file).name}"
    return f"from line {origin.line} of flexgen's {origin.file}"


def _users(file: str, text: str, anchor: str, sources: Mapping[str, KernelSource]) -> SourceView:
    first: dict[int, str] = {}
    for name, source in sources.items():
        for origin in source.line_map:
            if origin.written is Written.USER and origin.file == file:
                first.setdefault(origin.line, f"{name}-{origin.emitted}")
    lines = tuple(SourceLine(number, pieces, first.get(number, "")) for number, pieces in enumerate(coloured(text), 1))
    return SourceView(anchor, Path(file).name, lines)


def coloured(text: str) -> list[tuple[Piece, ...]]:
    """Return the pieces of each line of a Python text; one plain piece a line where it does not parse."""
    lines = text.split("\n")
    lines = lines[:-1] if not lines[-1] else lines
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return [(Piece(line),) for line in lines]
    return _cut(lines, tokens)


def _cut(lines: Sequence[str], tokens: Sequence[tokenize.TokenInfo]) -> list[tuple[Piece, ...]]:
    pieces: list[list[Piece]] = [[] for _ in lines]
    ends = [0 for _ in lines]
    before = ""
    for token in tokens:
        kind = _kind(token, before)
        before = token.string if token.type in (tokenize.NAME, tokenize.OP) else before
        for row, start, end in _spans(token, lines):
            if lines[row][ends[row] : start]:
                pieces[row].append(Piece(lines[row][ends[row] : start]))
            if lines[row][start:end]:
                pieces[row].append(Piece(lines[row][start:end], kind))
            ends[row] = max(ends[row], end)
    for row, line in enumerate(lines):
        if line[ends[row] :]:
            pieces[row].append(Piece(line[ends[row] :]))
    return [tuple(_joined(row)) for row in pieces]


def _spans(token: tokenize.TokenInfo, lines: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and end of the parts of a token, a line each; nothing for what has no text."""
    (first, start), (last, end) = token.start, token.end
    if not token.string.strip():
        return
    for row in range(first - 1, min(last, len(lines))):
        yield row, start if row == first - 1 else 0, end if row == last - 1 else len(lines[row])


def _kind(token: tokenize.TokenInfo, before: str) -> PieceKind:
    match token.type:
        case tokenize.COMMENT:
            return "comment"
        case tokenize.STRING:
            return "string"
        case tokenize.NUMBER:
            return "number"
        case tokenize.NAME if keyword.iskeyword(token.string):
            return "keyword"
        case tokenize.NAME if before == "def":
            return "name"
        case tokenize.NAME if token.string in _BUILTINS and before != ".":
            return "builtin"
        case tokenize.OP if token.string == "@":
            return "keyword"
    return ""


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join neighbours of one kind: most of a line is plain."""
    held: Piece | None = None
    for piece in pieces:
        if held is not None and held.kind == piece.kind:
            held = Piece(held.text + piece.text, held.kind)
            continue
        if held is not None:
            yield held
        held = piece
    if held is not None:
        yield held
