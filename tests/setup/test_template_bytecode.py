"""Compiled templates are found by the next process, and made again where they are not what was written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from flexgen.codegen.template_bytecode import TemplateBytecode

BASIS = b"the environment"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "greeting.jinja").write_text("hello {{ name }}")
    return tmp_path


def rendered(folder: Path, basis: bytes = BASIS) -> tuple[str, int]:
    """Return the text of the template in a new environment, and how many templates that compiled."""
    compiled = 0

    class Environment(jinja2.Environment):
        def compile(self, *args, **options):
            nonlocal compiled
            compiled += 1
            return super().compile(*args, **options)

    environment = Environment(loader=jinja2.FileSystemLoader(folder), bytecode_cache=TemplateBytecode(basis))
    return environment.get_template("greeting.jinja").render(name="you"), compiled


def test_the_second_environment_compiles_nothing(folder: Path):
    assert [rendered(folder) for _ in range(2)] == [("hello you", 1), ("hello you", 0)]


CHANGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-5]),
    "damaged": lambda file: file.write_bytes(file.read_bytes()[:-5] + b"12345"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_damaged_is_compiled_again(folder: Path, change: str):
    rendered(folder)
    (file,) = (folder / "__pycache__").iterdir()
    CHANGES[change](file)
    assert rendered(folder) == ("hello you", 1)


def test_another_text_and_another_environment_are_compiled(folder: Path):
    rendered(folder)
    assert rendered(folder, b"another") == ("hello you", 1)
    (folder / "greeting.jinja").write_text("bye {{ name }}")
    assert rendered(folder, b"another") == ("bye you", 1)


def test_nothing_is_written_where_python_writes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert [rendered(folder) for _ in range(2)] == [("hello you", 1), ("hello you", 1)]
    assert not (folder / "__pycache__").exists()
