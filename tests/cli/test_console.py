"""Plain text where it is piped, colour on a terminal that wants it, and lines that fit."""

from __future__ import annotations

import io
import re

import pytest

from flexgen.commands.console import RICH_IS_INSTALLED, Console, Span, wrapped


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(stream: io.StringIO) -> str:
    console = Console(out=stream, err=io.StringIO())
    console.line(Span("good", "green"), " [not markup]")
    console.table(("name", "n"), [("a", "1"), ("long", Span("22", "red"))])
    return stream.getvalue()


PLAIN = "good [not markup]\nname   n\na      1\nlong  22\n"


@pytest.fixture(autouse=True)
def _a_capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_pipe_gets_plain_text() -> None:
    assert written(io.StringIO()) == PLAIN


@pytest.mark.skipif(not RICH_IS_INSTALLED, reason="colours need rich")
def test_a_terminal_gets_colour() -> None:
    assert "\x1b[32mgood" in written(Terminal())


@pytest.mark.skipif(not RICH_IS_INSTALLED, reason="colours need rich")
def test_code_is_coloured_on_a_terminal_and_otherwise_untouched() -> None:
    code = 'def f(x):\n    return x + 1  # "[red]"' + " " * 120 + "\n\n"
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        Console(out=stream, err=io.StringIO()).code(code)
    assert pipe.getvalue() == code
    assert "\x1b[" in terminal.getvalue()
    assert re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue()) == code


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Terminal()) == PLAIN


def test_a_dumb_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert written(Terminal()) == PLAIN


def test_progress_is_shown_to_people_only() -> None:
    err = io.StringIO()
    assert list(Console(out=io.StringIO(), err=err).track([1, 2, 3], "working")) == [1, 2, 3]
    assert err.getvalue() == ""


def test_long_lines_continue_below_their_text() -> None:
    line = "  label     " + "word " * 8
    assert list(wrapped(line, 34)) == ["  label     word word word word", "            word word word word"]
    decision = "  NAME = 1 because: " + "word " * 4
    assert list(wrapped(decision, 34)) == ["  NAME = 1 because: word word word", "                    word"]
    assert list(wrapped("short\n\n  lines")) == ["short", "", "  lines"]
