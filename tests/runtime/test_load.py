"""A source is executed once, from its verified text, whatever happens to its file."""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flexgen.errors import InternalError
from flexgen.runtime.cache import CachedSource, SourceCache
from flexgen.runtime.load import load_module
from tests.runtime import kernels
from tests.runtime.conftest import HEADER, Load


def test_the_same_text_is_one_module_for_all_threads(load: Load):
    text = kernels.ADD + "# for threads\n"
    with ThreadPoolExecutor(4) as pool:
        modules = set(pool.map(load, [text] * 8))
    assert len(modules) == 1
    assert modules.pop().__name__ not in sys.modules


def test_the_name_comes_from_the_content(load: Load):
    assert load(kernels.ADD).__name__ != load(kernels.ADD + "# changed\n").__name__
    assert load(kernels.ADD).__name__.isidentifier()


def test_the_verified_text_counts_not_the_file(tmp_path: Path):
    text = HEADER + kernels.ADD + "# file changes\n"
    source = SourceCache(tmp_path).keep("filechanges", text)
    source.path.write_text("raise SystemExit\n")
    module = load_module(source)
    source.path.unlink()
    assert inspect.getsource(module.add.fn).startswith("@triton.jit\ndef add(")


def test_a_source_that_does_not_run_is_flexgens_fault(tmp_path: Path):
    with pytest.raises(InternalError, match="cannot be loaded: name 'missing' is not defined"):
        load_module(CachedSource(tmp_path / "broken.py", "missing\n"))
