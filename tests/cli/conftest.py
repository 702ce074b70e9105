"""Fixtures of the command line's tests: a user's files, and running a command in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexgen.cli import main

MODS = """\
import torch

print("said while loading")
table = torch.arange(96) // 10
SHAPE = (1, 2, 2, 96, 96, 16, 16)


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return table[q_idx] == table[kv_idx]


def branches(b, h, q_idx, kv_idx):
    return True if q_idx >= kv_idx else False


def any_arguments(*arguments):
    return arguments[0]


def factory(window):
    return causal
"""
CAUSAL = """\
SHAPE = (1, 2, 2, 256, 256, 16, 16)


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
"""


@dataclass(frozen=True, slots=True)
class Said:
    """What a command returned and wrote."""

    code: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: object) -> Said:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run_command


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def mods(write: Callable[[str, str], Path]) -> Path:
    return write("mods.py", MODS)


@pytest.fixture
def causal(write: Callable[[str, str], Path]) -> Path:
    return write("causal.py", CAUSAL)
