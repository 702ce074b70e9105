"""Whole kernels, one concept each, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.goldens.kernels import CASES, KernelCase

FOLDER = Path(__file__).parents[1] / "golden" / "kernels"
LONGEST_LINE = 120


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(case: KernelCase, golden: Callable[[str, str], None]) -> None:
    for entry, text in case.lower("sm_90").source.items():
        golden(f"kernels/{case.name}.py" if entry == "forward" else f"kernels/{case.name}.{entry}.py", text)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_golden_is_a_clean_module(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    compile(text, path.name, "exec")
    assert [line for line in text.split("\n") if len(line) > LONGEST_LINE or line != line.rstrip()] == []
    assert not re.search(r"\t|\n\n\n\n|/(tmp|home|root|work)/", text)
