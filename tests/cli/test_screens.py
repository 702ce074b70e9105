"""Whole screens, as a person sees them, in golden files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Run

Golden = Callable[[str, str], None]
SHAPE = ("--shape", "2,16,4,4096,4096,128,128")


def test_predicted_work(causal: Path, run: Run, golden: Golden) -> None:
    said = run("explain", causal, *SHAPE, "--target", "sm_90", "--backward")
    assert said.code == 0, said.err
    golden("screens/predicted_work.txt", said.out[said.out.index("predicted work of forward") :])


def test_diff_of_an_option(causal: Path, run: Run, golden: Golden) -> None:
    said = run("compile", causal, "--target", "sm_80", "--diff", "USE_SUBTILING=1", "PRESCALE_QK=1")
    assert said.code == 0, said.err
    golden("screens/diff.txt", said.out)


def test_sequences_sharded_over_ranks(causal: Path, run: Run, golden: Golden) -> None:
    shape = ("--shape", "1,16,16,131072,131072,128,128")
    said = run("explain", causal, *shape, "--target", "sm_90", "--ranks", "8", "64", "1024")
    assert said.code == 0, said.err
    golden("screens/context_parallel.txt", said.out[said.out.index("context parallel over") :])
