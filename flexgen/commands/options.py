"""`flexgen options`: every kernel option, and what it does."""

from __future__ import annotations

import argparse
import textwrap

from flexgen.commands.console import WIDTH, Console, Span
from flexgen.option_docs import OPTION_DOCS, PREFIX_NOTE, WHOLE_DOCS, OptionDoc, markdown

EXAMPLES = """\
  flexgen options                                the table
  flexgen options --markdown > docs/options.md   the page of the manual"""

_INDENT = 43


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print the page docs/options.md")


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.markdown:
        console.text(markdown())
        return 0
    console.line(Span(f"{'option':<25}{'values':<{_INDENT - 25}}what it does", "bold"))
    for name, doc in {**OPTION_DOCS, **WHOLE_DOCS}.items():
        _write(name, doc, console)
    console.line()
    for line in textwrap.wrap(PREFIX_NOTE.replace("`", ""), WIDTH):
        console.line(Span(line, "dim"))
    return 0


def _write(name: str, doc: OptionDoc, console: Console) -> None:
    values = textwrap.wrap(doc.values, _INDENT - 27, break_long_words=False, break_on_hyphens=False)
    text = f"{doc.summary} {doc.scope}".strip() + ("" if doc.default == "-" else f" Default: {doc.default}.")
    texts = textwrap.wrap(text, WIDTH - _INDENT, break_on_hyphens=False)
    for number in range(max(len(values), len(texts))):
        value = values[number] if number < len(values) else ""
        text = texts[number] if number < len(texts) else ""
        console.line(Span(f"{name if number == 0 else '':<25}", "cyan"), f"{value:<{_INDENT - 25}}{text}".rstrip())
