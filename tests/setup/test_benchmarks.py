"""Benchmarks that need a GPU say so without one, and write their results as tables."""

from __future__ import annotations

import pytest
import torch

import flexgen
from benchmarks import memcheck, memory, train_gpt
from benchmarks.memory import Memory, Row
from flexgen.fuzzing.inputs import drawn

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


COVERING = {case.name: case for case in memcheck.cases()}


@pytest.mark.parametrize("name", [name for name, case in COVERING.items() if case.needs == "nothing"])
def test_the_set_of_kernels_to_watch_is_right_in_the_interpreter(name: str):
    memcheck.run(COVERING[name], "cpu")


def test_the_rest_of_what_is_watched_runs_in_the_interpreter():
    memcheck.drops("cpu")
    memcheck.blocks("cpu")


@pytest.mark.parametrize("name", [name for name, case in COVERING.items() if case.needs == "hopper"])
def test_kernels_of_hopper_to_watch_are_such_kernels(name: str):
    case = COVERING[name]
    batch, heads, kv_heads, queries, keys, head_dim, value_dim = case.shape
    sizes = ((heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim))
    tensors = [drawn((batch, *size), case.dtype, requires_grad=case.backward, device="meta") for size in sizes]
    lowered = flexgen.compile(*case.mods("meta"), case.options).lower(*tensors, target="sm_90")
    names = ("backward_dq", "backward_dkdv", "backward_dk", "backward_dv") if case.backward else ("forward",)
    texts = [lowered.source[name] for name in names if name in lowered.source]
    assert texts and all("gluon" in text for text in texts)


def test_every_template_is_watched():
    """By the names of what they emit: forward and decode kernels, backward ones, tables."""
    names = " ".join(COVERING)
    for word in ("forward", "backward", "decode", "prefill", "packed", "table", "block mask", "pages", "Hopper"):
        assert word in names
