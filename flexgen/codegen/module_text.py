"""The text of an emitted module, made of a template, and where each of its lines comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flexgen.codegen.mod_printer import PrintedLine
from flexgen.codegen.render import RenderedLine, render
from flexgen.codegen.source import LineOrigin, Written
from flexgen.codegen.wrap import wrap_line


@dataclass(frozen=True, slots=True)
class Variable:
    """One `NAME = tl.constexpr(text)` line at the top of a module."""

    name: str
    text: str
    comment: str = ""


class PrintedFunction(Protocol):
    """Whatever was printed as device functions, and stands in the module as it is."""

    @property
    def lines(self) -> tuple[PrintedLine, ...]: ...


@dataclass(frozen=True, slots=True)
class ModuleText:
    """A module's text and, for each of its lines in order, what it comes from."""

    text: str
    line_map: tuple[LineOrigin, ...]


def render_module(
    template: str, *, printed: Sequence[PrintedFunction] = (), optional: Sequence[Variable] = (), **holes: Any
) -> ModuleText:
    """Render a kernel's module, and break long lines.

    Args:
        printed: the functions in it whose lines come from the user's.
        optional: template variables that are left out where the text does not read them.
    """
    lines = _without_unread(render(template, **holes), optional)
    wrapped = [RenderedLine(piece, line.origin) for line in lines for piece in wrap_line(line.text)]
    return ModuleText("\n".join(line.text for line in wrapped), _line_map(wrapped, printed))


def _without_unread(lines: Sequence[RenderedLine], optional: Sequence[Variable]) -> Sequence[RenderedLine]:
    text = "\n".join(line.text for line in lines)
    unread = [variable for variable in optional if len(re.findall(rf"\b{variable.name}\b", text)) == 1]
    starts = tuple(f"{variable.name} = tl.constexpr(" for variable in unread)
    return [line for line in lines if not line.text.startswith(starts)]


def _line_map(lines: Sequence[RenderedLine], printed: Iterable[PrintedFunction]) -> tuple[LineOrigin, ...]:
    """Return the origin of each line: the user's, where it says what one of theirs does, else the template's."""
    texts = [line.text for line in lines]
    users: dict[int, PrintedLine] = {}
    for function in printed:
        start = texts.index(function.lines[1].text) - 1  # the line below the decorator: no two functions share a name
        users |= {start + offset: line for offset, line in enumerate(function.lines)}
    found = []
    for number, line in enumerate(lines[:-1] if not texts[-1] else lines):
        span = users[number].span if number in users else None
        if span is not None:
            found.append(LineOrigin(number + 1, Written.USER, span.file, span.line))
        else:
            found.append(LineOrigin(number + 1, Written.TEMPLATE, line.origin.template, line.origin.line))
    return tuple(found)
