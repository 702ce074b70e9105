"""`flexgen compile --backward`: the backward kernels beside the forward one."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.cli.conftest import Run


def test_backward_kernels_are_printed(mods: Path, run: Run) -> None:
    said = run("compile", f"{mods}:softcap,causal", "--dump-code", "--backward", "--target", "sm_90")
    assert said.code == 0
    entries = {node.name for node in ast.parse(said.out).body if isinstance(node, ast.FunctionDef)}
    assert {"forward", "backward_delta", "backward_dq", "backward_dkdv", "score_grad"} <= entries


def test_backward_stages_are_written(causal: Path, run: Run, tmp_path: Path) -> None:
    said = run("compile", causal, "--dump-code", tmp_path / "out", "--backward", "--target", "interpret")
    assert said.code == 0
    assert {"05_backward_delta.py", "05_backward_dq.py", "05_backward_dkdv.py"} <= set(
        said.out.replace("/", " ").split()
    )


def test_score_gradient_is_a_stage(mods: Path, run: Run, tmp_path: Path) -> None:
    run("compile", f"{mods}:softcap", "--dump-code", tmp_path / "out", "--backward", "--target", "interpret")
    assert "dscore = " in (tmp_path / "out" / "03_score_grad.ir").read_text()


def test_without_the_flag_there_is_no_backward(causal: Path, run: Run) -> None:
    assert "backward" not in run("compile", causal, "--dump-code", "--target", "interpret").out
