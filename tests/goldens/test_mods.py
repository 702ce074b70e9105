"""One op or idiom a golden: the user's source, the simplified IR, and the device function printed from it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen.ir.graph import topological
from flexgen.ir.ops import OPS, OpKind
from flexgen.ir.parse import parse_mods
from flexgen.ir.text import print_mods
from tests.goldens.mods import CASES
from tests.goldens.mods.case import ModCase

FOLDER = Path(__file__).parents[1] / "golden" / "mods"
OF_THE_KERNEL = ("rescale", "attend", "forward")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mod(case: ModCase, golden: Callable[[str, str], None]) -> None:
    hardware, interpreted = case.lower("sm_90"), case.lower("interpret")
    printed = {"sm_90": device_functions(hardware.source["forward"])}
    printed["interpreter"] = device_functions(interpreted.source["forward"])
    if printed["interpreter"] == printed["sm_90"]:
        del printed["interpreter"]
    simplified = hardware.understood.simplified
    parts = [case.source, section("simplified"), print_mods(simplified.mods, simplified.origins)]
    parts += [section(target) + text for target, text in printed.items()]
    golden(f"mods/{case.name}.txt", "".join(parts))


def section(title: str) -> str:
    return f"\n---- {title}\n"


def device_functions(text: str) -> str:
    """Return the printed mods of an emitted module, and the names of the helpers it brings for them."""
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    own = [node for node in functions if node.name not in OF_THE_KERNEL]
    mods = [node for node in own if node.name.endswith("_mod") and node.args.args[0].arg in ("b", "score")]
    lines = text.splitlines()
    printed = ["\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]) + "\n" for node in mods]
    helpers = [node.name for node in own if node not in mods]
    return "\n".join(printed) + (f"# helpers: {', '.join(helpers)}\n" if helpers else "")


def test_every_op_occurs_in_a_golden() -> None:
    shown: set[str] = set()
    for path in FOLDER.glob("*.txt"):
        text = path.read_text().split("---- simplified\n")[1].split("\n---- ")[0]
        shown |= {node.op for graph in parse_mods(text).graphs() for node in topological(graph.root)}
    expected = {name for name, row in OPS.items() if row.kind is not OpKind.LEAF}
    assert expected - shown == set()
