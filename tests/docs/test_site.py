"""The documentation site builds without a warning, loads nothing from elsewhere, and shows what documents link to."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flexgen.cli import COMMANDS
from tests.docs.documents import DOCUMENTS, ROOT

NEEDED = ("mkdocs", "material", "mkdocstrings")
LOADED = re.compile(r'<(?:script|img|link|source)[^>]*(?:src|href)="(https?:[^"]*)"')


@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs the extra `docs`")
def test_the_site_builds_without_a_warning_and_stands_alone(tmp_path: Path) -> None:
    """One test, since the site takes seconds to build."""
    completed = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (completed.returncode, completed.stderr.strip()) == (0, ""), completed.stdout
    text = {str(path.relative_to(tmp_path)): path.read_text("utf-8") for path in tmp_path.rglob("*.html")}
    assert {f"{path.stem}.html" for path in DOCUMENTS if path.parent.name == "docs"} <= text.keys()
    assert {name: LOADED.findall(page) for name, page in text.items() if LOADED.search(page)} == {}
    assert "RowSet" in text["source/flexgen/lowering/solve.py.html"]
    assert 'href="source/flexgen/lowering/solve.py.html"' in text["mask_analysis.html"]
    assert text["commands.html"].count("usage: flexgen ") == len(COMMANDS)
    for words in ('id="flexgen.compile"', "block_table", "cu_seqlens_q", "A mod could not be traced"):
        assert words in text["reference.html"]
