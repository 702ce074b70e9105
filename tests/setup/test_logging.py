"""What the library has to say goes through `logging`, and only the command line writes to the process's streams."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.cli import main

PACKAGE = Path(__file__).parents[2] / "flexgen"
# What may write to a stream: the command line; and processes whose answers are messages to their parent.
WRITERS = {"cli.py", "__main__.py", "commands", "runtime/compile_worker.py", "fuzzing/worker.py"}
LIBRARY = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not {path.relative_to(PACKAGE).parts[0], path.relative_to(PACKAGE).as_posix()} & WRITERS
]


def written(tree: ast.AST) -> Iterator[str]:
    """Yield calls of print, and mentions of the process's streams."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print" | "pprint")):
                yield f"{node.lineno}: print"
            case ast.Attribute(value=ast.Name(id="sys"), attr="stdout" | "stderr"):
                yield f"{node.lineno}: sys.{node.attr}"
            case ast.Attribute(value=ast.Name(id="logging"), attr="basicConfig" | "info" | "warning" | "debug"):
                yield f"{node.lineno}: logging.{node.attr}, which is the root logger's"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_library_writes_to_no_stream(path: Path) -> None:
    assert list(written(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_the_check_sees_what_it_is_for() -> None:
    text = "import sys\nprint(1)\nsys.stderr.write('x')\nlogging.info('x')\nself.printer.print(2)\n"
    assert sorted(line.split(":")[0] for line in written(ast.parse(text))) == ["2", "3", "4"]


def test_a_first_call_is_logged_and_a_later_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    attention = flexgen.compile(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    tensors = torch.randn(3, 1, 2, 48, 16)
    with caplog.at_level(logging.DEBUG, logger="flexgen"):
        attention(*tensors)
        first = [record.getMessage() for record in caplog.records]
        caplog.clear()
        attention(*tensors)
    assert "captured mask_mod <lambda>" in first and "analysed the mask: closed form" in first
    assert any(line.startswith("forward for interpret, query (1, 2, 48, 16): tile ") for line in first)
    assert caplog.records == []


class TestCommandLine:
    """FLEXGEN_LOG."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> str:
        path = tmp_path / "causal.py"
        path.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n")
        return str(path)

    @pytest.mark.parametrize("level", ["info", "DEBUG", ""])
    def test_shows_what_is_logged_apart_from_the_result(
        self, file: str, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FLEXGEN_LOG", level)
        assert main(["compile", file, "--dump-code", "--target", "interpret"]) == 0
        said = capsys.readouterr()
        assert ("flexgen.capture: captured mask_mod mask_mod" in said.err) is (level == "DEBUG")
        assert "captured" not in said.out
        assert logging.getLogger("flexgen").handlers == []

    def test_refuses_what_is_no_level(
        self, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FLEXGEN_LOG", "loud")
        assert main(["explain", file]) == 2
        assert "FLEXGEN_LOG='loud' is no level" in capsys.readouterr().err
