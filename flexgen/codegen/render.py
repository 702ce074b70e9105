"""Renders Jinja2 templates from flexgen's template folder."""

from __future__ import annotations

from functools import cache

import jinja2


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("flexgen", "templates"),
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


def render(name: str, **holes: object) -> str:
    """Return the template's text with its holes filled; a missing hole is an error."""
    return _template(name).render(**holes)
