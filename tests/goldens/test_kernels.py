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
    (text,) = case.lower("sm_90").source.values()
    golden(f"kernels/{case.name}.py", text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_golden_is_a_clean_module(case: KernelCase) -> None:
    text = (FOLDER / f"{case.name}.py").read_text(encoding="utf-8")
    compile(text, case.name, "exec")
    assert [line for line in text.split("\n") if len(line) > LONGEST_LINE or line != line.rstrip() or "\t" in line] == []
    assert not re.search(r"\n\n\n\n|/(tmp|home|root|work)/", text)
