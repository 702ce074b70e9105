"""The documents are true: their code runs, their commands parse, and what they show and name exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import textwrap
from pathlib import Path

import pytest

import flexgen
from flexgen import cli, errors, option_docs
from flexgen.commands.arguments import file_first
from tests.docs.documents import DOCUMENTS, ROOT, Block, blocks, inline_code, links, missing_lines, prose

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="running kernels needs triton")

WITH_PYTHON = sorted({block.document for block in blocks("python")})
SKETCHES = [block for block in blocks("py") if block.excerpt_of is None]
EXCERPTS = [block for block in blocks("py") if block.excerpt_of is not None]
COMMAND = re.compile(r"(flexgen|make|\.venv/bin/python) ")
COMMAND_LINES = [
    pytest.param(line, id=f"{block.place}-{number}")
    for block in blocks("sh", "text")
    for number, line in enumerate(block.text.splitlines())
    if COMMAND.match(line)
]

# What the generated page of options takes for granted.
GIVEN: dict[str, dict[str, object]] = {"options.md": {"flexgen": flexgen, "score_mod": None, "mask_mod": None}}

# Parts of the project that a document may name by path.
PATH = re.compile(r"(?:flexgen|tests|docs|examples|benchmarks|\.ci)/[\w./*-]*")
CAPITALS = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
FORBIDDEN = re.compile(r"/(work|tmp|root|home)/|\bissue #?\d|(?<!\w)#\d+\b|\bTODO\b")


@needs_triton
@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: path.name)
def test_python_blocks_run_in_order(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "document", **GIVEN.get(path.name, {})}
    for block in blocks("python"):
        if block.document == path:
            source = "\n" * block.line + block.text  # so that a traceback names the document's line
            exec(compile(source, str(path), "exec"), namespace)


@pytest.mark.parametrize("block", SKETCHES, ids=lambda block: block.place)
def test_sketches_are_python(block: Block) -> None:
    text = textwrap.dedent(block.text)
    is_row = text.startswith('"')  # of a table
    ast.parse(f"{{{text}}}" if is_row else text)


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: block.place)
def test_excerpts_are_in_the_file(block: Block) -> None:
    assert block.excerpt_of is not None
    assert missing_lines(block.text, (ROOT / block.excerpt_of).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_commands_exist(line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    match program, arguments:
        case "make", [target]:
            assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case "flexgen", [command, *rest]:
            parsed = cli._program().parse_args([command, *file_first(rest)])
            file = getattr(parsed, "file", None)
            assert file is None or file.path.name == "mods.py" or (ROOT / file.path).exists()
        case _, ["-m", "pytest", "-q", *files]:
            assert files and all((ROOT / file).exists() for file in files)
        case _:
            pytest.fail(f"not a command that this test knows: {line}")


@needs_triton
@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.place)
def test_shown_output_is_what_the_command_prints(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    first, _, shown = block.text.partition("\n")
    prompt, program, *arguments = shlex.split(first)
    assert (prompt, program) == ("$", "flexgen")
    assert cli.main(arguments) == 0
    assert missing_lines(shown, capsys.readouterr().out) == []


@each_document
def test_linked_files_exist(path: Path) -> None:
    assert [target for target in links(path) if not (path.parent / target).exists()] == []


@each_document
def test_named_files_exist(path: Path) -> None:
    named = {name for code in inline_code(path) for name in PATH.findall(code)}
    assert sorted(name for name in named if not list(ROOT.glob(name.rstrip("./") or "."))) == []


@each_document
def test_names_of_the_package_resolve(path: Path) -> None:
    dotted = {name for code in inline_code(path) for name in re.findall(r"flexgen(?:\.[A-Za-z_]\w*)+", code)}
    for name in sorted(dotted):
        _, *attributes = name.split(".")
        found: object = importlib.import_module("flexgen")
        for attribute in attributes:
            found = getattr(found, attribute)


@each_document
def test_names_in_capitals_are_known_to_the_sources(path: Path) -> None:
    named = {name for code in inline_code(path) for name in CAPITALS.findall(code)} - {"TORCH_LOGS"}
    sources = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "flexgen").rglob("*.py"))
    sources += (ROOT / "tests/ir/random_graphs.py").read_text(encoding="utf-8")
    assert sorted(name for name in named if name not in sources) == []


@each_document
def test_nothing_private_is_mentioned(path: Path) -> None:
    assert FORBIDDEN.findall(path.read_text(encoding="utf-8")) == []


def test_the_readme_names_every_option_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Options\n")[2].partition("\n## ")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted([*option_docs.OPTION_DOCS, *option_docs.WHOLE_DOCS])


def test_the_page_of_options_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == option_docs.markdown()


def test_every_error_has_a_row_that_says_what_to_do() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells[3].strip() for line in text.splitlines() if len(cells := line.split("|")) == 5}
    classes = {
        name for name, found in vars(errors).items() if isinstance(found, type) and found.__module__ == errors.__name__
    }
    assert sorted(name for name in classes - {"FlexgenError", "SourceSpan"} if not rows.get(name)) == []


def test_the_readme_links_every_document() -> None:
    linked = {(ROOT / target).resolve() for target in links(ROOT / "README.md")}
    assert sorted(path.name for path in DOCUMENTS if path.name != "README.md" and path not in linked) == []


def test_speed_is_quoted_from_committed_results() -> None:
    section = prose(ROOT / "README.md").partition("## Speed\n")[2].partition("\n## ")[0]
    claims = re.findall(r"\d+(?:\.\d+)?\s?(?:x|ms|us|%|TFLOPS|TFLOP/s)\b", section)
    results = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks/results").glob("*.md"))
    assert [claim for claim in claims if claim.split()[0].rstrip("x%") not in results] == []
