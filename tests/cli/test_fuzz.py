"""`flexgen fuzz` counts what it covered, and writes what it found as tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run


def test_the_command_counts_and_says_what_was_covered(run: Run, monkeypatch: pytest.MonkeyPatch):
    said = run("fuzz", "--seconds", "60", "--cases", "6", "--jobs", "1", "--target", "interpret")
    assert said.code == 0, said.err
    assert re.search(r"cases +[6-9], refused", said.out)
    assert "against float64" in said.out and said.out.endswith("no failure\n")


def test_the_command_writes_failures_as_tests(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fails = """
from flexgen.fuzzing import hunt, worker
def wrong(*args, **options):
    raise AssertionError("always")
hunt.check_call = wrong
hunt.SHRINKING_SECONDS = 1.0
worker.main()
"""
    monkeypatch.setattr("flexgen.fuzzing.pool.WORKER", ("-c", fails))
    said = run("fuzz", "--seconds", "30", "--cases", "2", "--jobs", "1", "--out", tmp_path, "--target", "interpret")
    assert said.code == 1
    assert "AssertionError: always" in said.out
    assert "def test_case" in (tmp_path / "test_found_1.py").read_text()


def test_without_hypothesis_the_command_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = run("fuzz", "--seconds", "1")
    assert said.code == 2 and "flexgen[fuzz]" in said.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--seconds", "0"), "--seconds 0.0 is none"), (("--jobs", "0"), "--jobs 0 is none")],
)
def test_what_would_run_nothing_is_refused(run: Run, arguments: tuple[str, ...], told: str):
    said = run("fuzz", *arguments)
    assert said.code == 2 and told in said.err
