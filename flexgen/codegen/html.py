"""Renders the HTML templates: everything that fills a hole is escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("flexgen", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
        auto_reload=False,
    )


def render_html(name: str, **holes: Any) -> str:
    """Return a template's text; what fills its holes cannot end a tag, an attribute or a script."""
    return _environment().get_template(name).render(**holes)


def asset(name: str) -> Markup:
    """Return the text of a style sheet or script of the template folder, to stand in a page as it is."""
    return Markup((resources.files("flexgen") / "templates" / name).read_text(encoding="utf-8"))


def content_hash(text: str) -> str:
    """Return what a page's content security policy calls an inline style sheet or script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
