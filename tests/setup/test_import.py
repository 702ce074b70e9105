"""`import flexgen` is quick, and brings in nothing heavy that a user did not ask for."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch._inductor", "torch._dynamo", "sympy", "attn_gym", "transformers", "rich")

MEASURE = """
import importlib.util, time
import torch
if importlib.util.find_spec("triton"):
    import triton
start = time.process_time()
import flexgen
flexgen.compile, flexgen.create_block_mask, flexgen.flex_attention
print(time.process_time() - start)
"""
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


def test_import_adds_little_to_torch_and_triton() -> None:
    # Processor time, and the best of three: what a busy machine adds is not flexgen's.
    assert min(float(run(MEASURE)) for _ in range(3)) < 0.3
