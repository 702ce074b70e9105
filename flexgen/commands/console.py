"""Where commands write: results to standard output, notes to standard error, coloured only on a terminal."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO, TypeVar

T = TypeVar("T")
Style = Literal["", "bold", "dim", "green", "red", "yellow", "cyan"]
WIDTH = 100  # lines are wrapped to this many columns

try:
    from rich.console import Console as RichConsole
    from rich.progress import track as rich_track
    from rich.syntax import Syntax as RichSyntax
    from rich.text import Text as RichText
except ImportError:  # the extra `cli` is not installed: the same text, without colour
    RICH_IS_INSTALLED = False
else:
    RICH_IS_INSTALLED = True


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a line and how it is shown on a terminal."""

    text: str
    style: Style = ""


Line = Sequence[Span]


class Console:
    """Writes results to `out` and notes to `err`.

    Args:
        out, err: streams; those of the process by default.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._err = sys.stderr if err is None else err
        self._rich_out = _rich_console(self._out)
        self._rich_err = _rich_console(self._err)

    def text(self, text: str) -> None:
        """Write text as it is."""
        self._out.write(text)

    def code(self, text: str) -> None:
        """Write Python as it is, in colours on a terminal."""
        if self._rich_out is None:
            self._out.write(text)
            return
        # ansi_dark takes the terminal's own sixteen colours, which its user chose to be readable.
        painted = RichSyntax("", "python", theme="ansi_dark").highlight(text)
        self._rich_out.print(painted, soft_wrap=True, end="" if text.endswith("\n") else "\n")

    def line(self, *spans: Span | str) -> None:
        """Write one line."""
        _write(self._out, self._rich_out, [_span(span) for span in spans])

    def note(self, text: str, style: Style = "dim") -> None:
        """Write what is not part of the result, such as which default was taken."""
        for line in text.splitlines():
            _write(self._err, self._rich_err, [Span(line, style)])

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Span | str]], left: int = 1) -> None:
        """Write aligned columns: the first `left` of them to the left, the rest to the right."""
        cells = [[Span(name, "bold") for name in header], *([_span(cell) for cell in row] for row in rows)]
        widths = [max(len(row[column].text) for row in cells) for column in range(len(header))]
        for row in cells:
            padded = [_padded(cell, widths[column], column < left) for column, cell in enumerate(row)]
            spaced = [part for cell in padded for part in (Span("  "), cell)][1:]
            _write(self._out, self._rich_out, [*spaced[:-1], Span(spaced[-1].text.rstrip(), spaced[-1].style)])

    def progress(self, work: Iterable[T], total: int, description: str) -> Iterable[T]:
        """Yield what work yields, of which there are `total`, with a progress bar where a person is watching."""
        if self._rich_err is None:
            return work
        return self._progress(work, total, description)

    def _progress(self, work: Iterable[T], total: int, description: str) -> Iterator[T]:
        yield from rich_track(work, description, total=total, console=self._rich_err, transient=True)

    def track(self, work: Sequence[Any], description: str, at_least: int = 2) -> Iterable[Any]:
        """Yield the items of `work`, with a progress bar where a person is watching and they are many enough."""
        if self._rich_err is None or len(work) < at_least:
            return iter(work)
        return self._tracked(work, description)

    def _tracked(self, work: Sequence[Any], description: str) -> Iterator[Any]:
        yield from rich_track(work, description, console=self._rich_err, transient=True)

    @property
    def is_watched(self) -> bool:
        """Whether notes go to a terminal, where a line may change."""
        return self._rich_err is not None

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a line while work goes on, where a person is watching; what it yields changes it."""
        if self._rich_err is None:
            yield lambda text: None
            return
        with self._rich_err.status(text) as status:
            yield status.update

    def flush(self) -> None:
        self._out.flush()
        self._err.flush()


def wrapped(text: str, width: int = WIDTH) -> Iterator[str]:
    """Yield the lines of a text, those that are too long broken at spaces and continued below their text."""
    for line in text.splitlines():
        if len(line) <= width:
            yield line
            continue
        indent = " " * _hanging_indent(line, width)
        yield from textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}(?=\S)")


def _hanging_indent(line: str, width: int) -> int:
    """Return the column at which the line's own text starts: behind its label or its "because:"."""
    because = line.find("because: ")
    label = _LABEL.match(line)
    column = because + len("because: ") if because >= 0 else label.end() if label else 0
    return column if 0 < column <= 0.6 * width else len(line) - len(line.lstrip()) + 4


def counted(number: int, noun: str) -> str:
    """Return "1 tile" or "2 tiles"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _span(span: Span | str) -> Span:
    return Span(span) if isinstance(span, str) else span


def _padded(cell: Span, width: int, to_the_left: bool) -> Span:
    return Span(cell.text.ljust(width) if to_the_left else cell.text.rjust(width), cell.style)


def _write(stream: TextIO, rich: Any, spans: Line) -> None:
    if rich is None:
        stream.write("".join(span.text for span in spans).rstrip() + "\n")
        return
    text = RichText.assemble(*((span.text, span.style) for span in spans))
    rich.print(text, soft_wrap=True, highlight=False)


def _rich_console(stream: TextIO) -> Any:
    """Return rich's console for a terminal that wants colours, else None."""
    wanted = stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return RichConsole(file=stream) if RICH_IS_INSTALLED and wanted else None
