"""Hopper kernels as text: one concept each, byte for byte, and each one checked on a GPU."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gluon_verified import code_digest
from tests.gluon.problems import CHECKS, lowered

VERIFIED = Path(__file__).parents[1] / "gpu_verified.json"
GOLDENS = {
    "hopper_causal": "causal D=128",
    "hopper_window_in_one_warpgroup": "window 100 D=64",
    "hopper_window_persistent": "window 1024 D=128",
    "hopper_softcap": "softcap rows=128 D=128",
    "hopper_two_windows": "two windows D=128",
    "hopper_block_mask": "block mask 128x128 causal",
}


@pytest.mark.usefixtures("golden_spelling")
@pytest.mark.parametrize("name", GOLDENS)
def test_kernel(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"kernels/{name}.py", lowered(CHECKS[GOLDENS[name]]).source["forward"])


@pytest.mark.usefixtures("golden_spelling")
@pytest.mark.parametrize("name", GOLDENS)
def test_kernel_was_checked_on_a_gpu(name: str) -> None:
    """Gluon has no interpreter: a changed kernel is run by `python -m benchmarks.gluon_check` and recorded."""
    source = lowered(CHECKS[GOLDENS[name]]).source["forward"]
    entry = json.loads(VERIFIED.read_text()).get(code_digest(source))
    assert entry is not None, "run benchmarks.gluon_check on a Hopper GPU, then again with --record"
    assert {"check", "error", "device", "date", "torch", "triton"} <= entry.keys()
    assert entry["error"] < 0.02


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_kernel_is_a_module_without_leftovers(name: str) -> None:
    text = lowered(CHECKS[name]).source["forward"]
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert "flexgen" not in names
    assert not re.search(r"\btl\.(?!PropagateNan)\w+", text.split('"""', 2)[2])
    # Plain Triton's own warp specialisation hangs on sm_90.
    assert "warp_specialize=True" not in text
    assert [line for line in text.split("\n") if line != line.rstrip()] == []
