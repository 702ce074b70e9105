"""Digests are the same in every process and change with what they digest, and with nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings

from flexgen.errors import SourceSpan
from flexgen.ir.digest import structure_digest, text_digest
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.parse import parse_mods
from flexgen.ir.text import print_mods
from tests.ir import random_graphs

TEXT = """\
score bias(score, b, h, q_idx, kv_idx)   buffers: table float32[*](1), slope float32[4](1)   scalars: cap float32
  return add(mul(score, load(slope, h)), mul(cap, load(table, sub(kv_idx, table.size(0)))))
mask causal(b, h, q_idx, kv_idx)
  return ge(q_idx, kv_idx)
"""
MODS = parse_mods(TEXT)
RENAMED = parse_mods(TEXT.replace("table", "relative").replace("cap", "limit").replace("bias", "alibi"))

CHANGES = [
    ("table float32", "table float16"),
    ("table float32[*]", "table float32[8]"),
    ("table float32[*](1)", "table float32[*](*)"),
    ("table float32[*](1)", "table float32[*](1) grad"),
    ("cap float32", "cap float64"),
    ("mul(score", "add(score"),
    ("load(slope, h)", "load(slope, b)"),
    ("load(slope, h)", "load(table, h)"),
    ("sub(kv_idx, table.size(0))", "sub(table.size(0), kv_idx)"),
    ("table.size(0)", "slope.size(0)"),
    ("ge(q_idx", "gt(q_idx"),
    ("ge(q_idx, kv_idx)", "ge(q_idx, q_idx)"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_structure_digest_sees_each_change(old: str, new: str) -> None:
    text = TEXT.replace(old, new)
    if "float16" in new:
        text = text.replace("mul(cap, load(table, sub(kv_idx, table.size(0))))",
                            "mul(cap, cast(load(table, sub(kv_idx, table.size(0))), float32))")  # fmt: skip
    assert structure_digest(parse_mods(text)) != structure_digest(MODS)
    assert text_digest(parse_mods(text)) != text_digest(MODS)


@pytest.mark.parametrize(("left", "right"), [("0.0", "-0.0"), ("0.0", "nan"), ("1.0", "1.0000000000000002")])
def test_digests_tell_close_constants_apart(left: str, right: str) -> None:
    mods = [parse_mods(f"score m(score) return add(score, {value})") for value in (left, right)]
    assert len({structure_digest(mod) for mod in mods}) == 2


def test_structure_digest_leaves_names_out_and_text_digest_does_not() -> None:
    assert structure_digest(RENAMED) == structure_digest(MODS)
    assert text_digest(RENAMED) != text_digest(MODS)


def _origins(variable: str, line: int, text: str = "return score") -> Origins:
    root = MODS.graphs()[0].root
    return Origins({root: (Origin(variable, SourceSpan("a.py", line, 4, line, 9, text)),)})


def test_text_digest_sees_variables_and_lines_but_not_where_the_mod_stands() -> None:
    digest = text_digest(MODS, _origins("x", 3))
    assert text_digest(MODS, _origins("x", 40)) == digest
    assert text_digest(MODS, _origins("y", 3)) != digest
    assert text_digest(MODS, _origins("x", 3, "return score " + " " * 120 + "# same beginning")) != digest


@settings(max_examples=50, deadline=None)
@given(random_graphs.mods())
def test_digests_survive_the_text(mods: Mods) -> None:
    assert structure_digest(parse_mods(print_mods(mods))) == structure_digest(mods)


def test_digests_are_the_same_in_another_process_with_other_hashes() -> None:
    code = (
        "import sys\nfrom flexgen.ir.digest import structure_digest, text_digest\n"
        "from flexgen.ir.parse import parse_mods\nmods = parse_mods(sys.argv[1])\n"
        "print(structure_digest(mods), text_digest(mods))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", code, TEXT]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert output.split() == [structure_digest(MODS), text_digest(MODS)]
