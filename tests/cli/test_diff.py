"""`flexgen compile --diff`: what options change; the whole screen is a golden of test_screens.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen.commands.console import RICH_IS_INSTALLED
from tests.cli.conftest import Run


def test_decisions_come_first_then_every_text_that_differs(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--target", "sm_80", "--backward", "--diff", "bwd_num_warps=8", "fwd_BLOCK_N=16")
    assert said.code == 0, said.err
    decisions, diff = said.out.split("\n--- ", 1)
    assert "BLOCK_N" in decisions and "backward_dq: num_warps" in decisions and "4 -> 8" in decisions
    assert decisions.index("BLOCK_N") < decisions.index("backward_dq")
    assert [line for line in f"--- {diff}".splitlines() if line.startswith("--- ")] == [
        "--- forward.py",
        "--- backward_dq.py",
        "--- backward_dkdv.py",
    ]
    assert "+++ forward.py  bwd_num_warps=8 fwd_BLOCK_N=16" in diff
    assert "\n-BLOCK_N = tl.constexpr(" in diff and "\n+BLOCK_N = tl.constexpr(16)" in diff


def test_the_options_stand_beside_those_of_set(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--target", "sm_80", "--set", "BLOCK_N=16", "--diff", "BLOCK_N=32")
    assert "16 -> 32" in said.out


def test_another_backend_is_a_change_like_any_other(causal: Path, run: Run) -> None:
    shape = ("--shape", "1,2,2,1024,1024,64,64")
    said = run("compile", causal, "--target", "sm_90", *shape, "--diff", "BACKEND=TRITON")
    assert "GLUON -> TRITON" in said.out and "not decided any more" in said.out
    assert "\n-import triton.experimental" in said.out or "\n-from triton.experimental" in said.out


def test_nothing_changed_is_told(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--target", "sm_80", "--set", "num_stages=2", "--diff", "num_stages=2")
    assert said.out == "num_stages=2 changes nothing for sm_80: flexgen decides the same by itself\n"


def test_a_reason_alone_is_told_and_that_the_text_is_the_same(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--target", "sm_80", "--diff", "USE_SUBTILING=0")
    assert "False, as before" in said.out and said.out.endswith("the emitted text is the same\n")


def test_wrong_use_says_what_and_how(causal: Path, run: Run) -> None:
    both = run("compile", causal, "--dump-code", "--diff", "num_stages=2")
    assert both.code == 2 and "exclude each other" in both.err and "fix:" in both.err
    unknown = run("compile", causal, "--diff", "BLOCK_MM=2")
    assert unknown.code == 2 and "BLOCK_M" in unknown.err
    malformed = run("compile", causal, "--diff", "BLOCK_M")
    assert malformed.code == 2 and "is not NAME=VALUE" in malformed.err


@pytest.mark.skipif(not RICH_IS_INSTALLED, reason="colours need rich")
def test_a_pipe_gets_no_colours(causal: Path, run: Run) -> None:
    assert "\x1b" not in run("compile", causal, "--target", "sm_80", "--diff", "num_stages=1").out
