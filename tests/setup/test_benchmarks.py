"""Benchmarks that need a GPU say so without one, and write their results as tables."""

from __future__ import annotations

import pytest
import torch

from benchmarks import memory, train_gpt
from benchmarks.memory import Memory, Row

ABOUT = {"device": "a GPU", "date": "2026-12-01"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("benchmark", [memory, train_gpt], ids=["memory", "train_gpt"])
def test_without_a_gpu_a_benchmark_leaves_with_the_reason(benchmark, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark"])
    with pytest.raises(SystemExit, match="measures on a CUDA device, and torch finds none"):
        benchmark.main()


def test_memory_is_shown_in_mib():
    row = Row("causal", 8192, 128, Memory(3 << 20, 2 << 20, 0), Memory(9 << 20, 5 << 19, 1 << 19))
    lines = memory.report([row], ABOUT).splitlines()
    assert lines[2] == "- device: a GPU"
    assert lines[-1] == "| 8192 | 128 | causal | 3.0 | 9.0 | 2.0 | 2.5 | 0.0 | 0.5 |"
    assert [line.count("|") for line in lines[-3:]] == [10, 10, 10]


def test_curves_are_shown_step_by_step():
    lines = train_gpt.report({"flexgen": [2.0, 1.5], "flex": [2.0, 1.75]}, ABOUT).splitlines()
    assert "Largest difference of the losses: 0.25000." in lines
    assert lines[-1] == "| 1 | 1.50000 | 1.75000 | -0.25000 |"
    assert train_gpt.largest_difference([1.0], [float("nan")]) == float("inf")
