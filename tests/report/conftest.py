"""Reports of a few files, made once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexgen.cli import main
from flexgen.commands.file_spec import parse_file_spec
from flexgen.commands.subject import Subject, load_subject
from tests.report import browser as chromium

# What a page must not take for markup: in names, comments, strings, and in the file's own name.
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>\"'`{{7*7}}&lt;"

MODS = """\
import torch

SHAPE = (1, 2, 1, 512, 384, 16, 16)
bias = torch.linspace(-1, 1, 512 * 384).reshape(512, 384)


def score_mod(score, b, h, q_idx, kv_idx):
    capped = 20 * torch.tanh(score / 20)
    return capped + bias[q_idx, kv_idx]


def mask_mod(b, h, q_idx, kv_idx):
    causal = q_idx >= kv_idx
    return causal | (kv_idx < 40)
"""
HOSTILE = f'''\
"""{EVIL.replace(chr(34), "")}"""

SHAPE = (1, 1, 1, 64, 64, 16, 16)


def mask_mod(b, h, q_idx, kv_idx):
    # {EVIL}
    return (q_idx >= kv_idx) & (h < len("""{EVIL.replace(chr(34), "")}"""))  # {EVIL}


mask_mod.__name__ = mask_mod.__qualname__ = {EVIL!r}
'''


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


def _report(file: Path, *arguments: str) -> Path:
    page = file.with_suffix(".html")
    assert main(["report", str(file), "-o", str(page), *arguments]) == 0
    return page


@pytest.fixture(scope="session")
def page(folder: Path) -> Path:
    """The report of a score_mod and a mask_mod with their backward; there is no machine code to wait for."""
    file = folder / "mods.py"
    file.write_text(MODS)
    return _report(file, "--target", "interpret", "--backward")


@pytest.fixture(scope="session")
def compiled_page(folder: Path) -> Path:
    """The report of the forward for sm_90, with what its machine code costs."""
    file = folder / "compiled.py"
    file.write_text(MODS)
    return _report(file, "--target", "sm_90", "--set", "BACKEND=TRITON")


@pytest.fixture(scope="session")
def hostile_page(folder: Path) -> Path:
    file = folder / "a&b<i>'x'.py"
    file.write_text(HOSTILE)
    return _report(file, "--target", "interpret")


@pytest.fixture(scope="session")
def browser() -> Iterator[chromium.Browser]:
    if reason := chromium.missing():
        pytest.skip(reason)
    with chromium.browser() as started:
        yield started


def subject_of(file: Path) -> Subject:
    """Return what a command works on."""
    return load_subject(argparse.Namespace(file=parse_file_spec(str(file)), set=[], shape=None, dtype="bfloat16"))
