"""What the documentation site does besides rendering.

Documents link to files of the repository by relative paths, which readers of the repository can follow: in the site
each such file is a page that shows it. And `<!-- help: COMMAND -->` becomes what the command says with --help.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
_HELP = re.compile(r"<!-- help: (\w+) -->")
_LANGUAGES = {".py": "python", ".jinja": "jinja", ".yml": "yaml", ".cfg": "ini", ".toml": "toml"}
_FENCE = "`" * 6


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside of the documents that one of them links to."""
    texts = [file.content_string for file in files.documentation_pages()]
    for target in sorted({match[1] for text in texts for match in _LINK.finditer(text)}):
        path = target.removeprefix("../")
        shown = File.generated(config, _page(path), content=_shown(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(shown)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository at their pages."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = posixpath.relpath(_page(match[1].removeprefix("../")), here or ".")
        return f"]({path}{match[2] or ''})"

    if page.file.src_uri.startswith("source/"):
        return markdown
    return _HELP.sub(lambda match: _help_of(match[1]), _LINK.sub(moved, markdown))


def _help_of(command: str) -> str:
    """Return what a command says with --help, at the width of a terminal."""
    sys.path[:0] = [str(ROOT)]
    from flexgen.cli import main  # where no command is shown, nothing of it is needed

    said = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main([command, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if before is None else {"COLUMNS": before}
    return f"```text\n{said.getvalue().rstrip()}\n```"


def _page(path: str) -> str:
    return f"source/{path.removesuffix('.md')}.md"


def _shown(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = _LANGUAGES.get(Path(path).suffix, "text")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n"
    return f'{head}\n{_FENCE}{language} linenums="1"\n{text.rstrip()}\n{_FENCE}\n'
