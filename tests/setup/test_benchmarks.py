"""Benchmarks that need a GPU say so without one, and write their results as tables."""

from __future__ import annotations

import json

import pytest
import torch

import flexgen
from benchmarks import context_parallel, matrix, memcheck, memory, train_gpt
from benchmarks.cases import window
from benchmarks.memory import Memory, Row
from flexgen.fuzzing.inputs import drawn

ABOUT = {"device": "a GPU", "date": "2026-12-01"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("benchmark", [context_parallel, matrix, memory, train_gpt], ids=lambda module: module.__name__)
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


SMALL = matrix.Problem("window", None, window(7), 1, 4, 2, 24, 40, 16)


def test_live_pairs_are_counted_by_the_mask(monkeypatch):
    monkeypatch.setattr(matrix, "ROWS_AT_A_TIME", 5)
    assert matrix.live_pairs(SMALL, "cpu") == sum(0 <= q - k <= 7 for q in range(24) for k in range(40))


def test_the_reference_is_the_shared_head_and_its_queries():
    """Against flexgen itself, in the interpreter; a wrong gradient is told."""
    torch.manual_seed(0)
    sizes = ((4, 24), (2, 40), (2, 40))
    tensors = [torch.randn(1, heads, length, 16, requires_grad=True) for heads, length in sizes]
    grad = torch.randn(1, 4, 24, 16)
    output = flexgen.compile(None, SMALL.mask_mod)(*tensors)
    found = [output, *torch.autograd.grad(output, tensors, grad)]
    wanted = matrix.reference(SMALL, tensors, grad)
    assert matrix.worst_error(SMALL, found, wanted) < 1e-5
    assert matrix.worst_error(SMALL, [*found[:3], 1.1 * found[3]], wanted) > matrix.MOST_ERROR


def test_the_matrix_is_shown_as_a_table_and_drawn(tmp_path):
    rows = [
        {"case": "causal", "shape": SMALL.shape, "pass": name, "ms": {}, "wrong": [], "errors": {}}
        | {"tflops": {"flexgen": 400.0, "flex": 250.0, "fa2": 300.0}}
        for name in ("forward", "backward")
    ]
    lines = matrix.report(rows, ABOUT).splitlines()
    assert "| causal | B=1 H=4/2 S=24 x 40 D=16 bf16 | forward | 400 | 250 |  | 300 | 1.60 |" in lines
    assert "backward: 1.60 times flex as a geometric mean, at least 1.60." in lines
    results = tmp_path / "matrix.json"
    about = {"device": "a GPU", "date": "2026-12-01", "torch": "2.13.0", "triton": "3.7.1"}
    results.write_text(json.dumps({"environment": about, "rows": rows}))
    assert "fa2" in matrix.plot(results).read_text()


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
