"""Renders Jinja2 templates from flexgen's template folder, and knows which line of a template each line comes from.

Line breaks that stand in a template are preceded, while it is rendered, by a mark that names template and line. The
marks are taken out again before the text is used. A line break that a hole brings has no mark: its line belongs to
the next one that has, which is where the hole stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from flexgen.codegen.template_bytecode import TemplateBytecode

_MARK = re.compile("\x01([^\x01\x02]*):([0-9]+)\x02")  # names and numbers only: no word that a translation looks for


@dataclass(frozen=True, slots=True)
class TemplateLine:
    """A line of a template, by its name in the template folder; lines count from 1."""

    template: str
    line: int


@dataclass(frozen=True, slots=True)
class RenderedLine:
    """A line of rendered text and the template's line that it comes from."""

    text: str
    origin: TemplateLine


class _MarkLines(Extension):
    """Puts a mark before every line break of a template's text."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            yield _marked(token, str(stream.name)) if token.type == "data" else token


def _marked(token: Token, template: str) -> Token:
    """Mark the line breaks of a piece of text, but for empty lines: filters know those by their being empty."""
    *ended, last = token.value.split("\n")
    for number, line in enumerate(ended):
        if line or number == 0:  # the first may end a line that a hole began
            ended[number] = f"{line}\x01{template}:{token.lineno + number}\x02"
    return Token(token.lineno, token.type, "\n".join([*ended, last]))


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("flexgen", "templates"),
        extensions=[_MarkLines],
        bytecode_cache=TemplateBytecode(Path(__file__).read_bytes()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,
    )


@cache
def _template(name: str) -> jinja2.Template:
    return _environment().get_template(name)


def render_part(name: str, **holes: Any) -> str:
    """Return a template's text, still marked and without its last line break, to fill a hole of another template."""
    return _template(name).render(**holes).rstrip()


def render(name: str, **holes: Any) -> tuple[RenderedLine, ...]:
    """Return the lines of the template's text with its holes filled; a missing hole is an error."""
    lines = _template(name).render(**holes).split("\n")
    origins: list[TemplateLine] = []
    following = TemplateLine(name, 1)
    for line in reversed(lines):
        if found := _MARK.search(line):  # of a part in a hole, its own mark comes first
            following = TemplateLine(found[1], int(found[2]))
        origins.append(following)
    return tuple(map(RenderedLine, (_MARK.sub("", line) for line in lines), reversed(origins)))
