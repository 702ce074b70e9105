"""Triton's digest of its own files is computed by one process, and again when one of the files is another."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import triton
from triton.runtime import cache as triton_cache

from flexgen.runtime.triton_digest import remember_digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something that lies on disk as Triton does."""
    package = tmp_path / "triton"
    (package / "backends" / "nvidia").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "backends" / "nvidia" / "compiler.py").write_text("a = 1")
    monkeypatch.setattr(triton, "__file__", str(package / "__init__.py"))
    return package


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Stands for a new process; returns the digests that Triton computed in it."""

    def start() -> list[str]:
        computed: list[str] = []

        @functools.lru_cache
        def triton_key() -> str:
            computed.append("computed")
            return "digest"

        monkeypatch.setattr(triton_cache, "triton_key", triton_key)
        return computed

    return start


def remembered(directory: Path) -> str:
    remember_digest(directory)
    return str(triton_cache.triton_key())


@pytest.mark.usefixtures("package")
def test_the_second_process_computes_nothing(tmp_path: Path, fresh: Callable[[], list[str]]):
    counts = []
    for _ in range(2):
        computed = fresh()
        assert remembered(tmp_path) == remembered(tmp_path) == "digest"
        counts.append(len(computed))
    assert counts == [1, 0]


CHANGES: dict[str, Callable[[Path], object]] = {
    "contents": lambda file: file.write_text("a = 2"),
    "times": lambda file: os.utime(file, (1, 1)),
    "another file": lambda file: file.with_name("driver.py").touch(),
    "none": lambda file: file.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_looked_at_again(package: Path, tmp_path: Path, fresh: Callable[[], list[str]], change: str):
    fresh()
    remember_digest(tmp_path)
    CHANGES[change](package / "backends" / "nvidia" / "compiler.py")
    computed = fresh()
    remember_digest(tmp_path)
    assert computed


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"stamp": "another", "digest": "wrong"})])
def test_what_cannot_be_read_is_computed(tmp_path: Path, fresh: Callable[[], list[str]], text: str):
    fresh()
    remember_digest(tmp_path)
    (file,) = tmp_path.glob("triton-*.json")
    file.write_text(text)
    computed = fresh()
    assert remembered(tmp_path) == "digest"
    assert computed


@pytest.mark.usefixtures("package")
def test_a_directory_that_is_not_there_keeps_nothing(tmp_path: Path, fresh: Callable[[], list[str]]):
    fresh()
    assert remembered(tmp_path / "none") == "digest"


def test_the_digest_of_the_installed_triton_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.find_spec("triton.runtime.cache")
    assert spec is not None and spec.loader is not None
    anew = importlib.util.module_from_spec(spec)  # in this process it may be remembered already
    spec.loader.exec_module(anew)
    expected = anew.triton_key()
    monkeypatch.setattr(triton_cache, "triton_key", anew.triton_key)
    assert remembered(tmp_path) == expected
    monkeypatch.setattr(triton_cache, "triton_key", functools.lru_cache(lambda: "not asked"))
    assert remembered(tmp_path) == expected
