"""`import flexgen` brings in nothing that a user did not ask for; the time it takes is benchmarks/import_time.py's."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch._inductor", "torch._dynamo", "sympy", "attn_gym", "transformers", "rich", "hypothesis")

LIST = """
import sys
import flexgen
flexgen.compile, flexgen.create_block_mask, flexgen.flex_attention
print(*sorted(sys.modules), sep="\\n")
"""


def run(program: str) -> str:
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_import_brings_in_nothing_heavy() -> None:
    loaded = run(LIST).split()
    assert [name for name in loaded if name.startswith(HEAVY)] == []


def test_import_alone_loads_no_part_of_flexgen() -> None:
    loaded = run("import sys, flexgen; print(*sys.modules, sep='\\n')").split()
    assert [name for name in loaded if name.startswith(("flexgen.", "torch"))] == []
