"""Gradients of captured tensors that do not depend on the order in which programs run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import flexgen
from flexgen.runtime import interpret
from flexgen.runtime.fixed_point import scale_for, to_float
from tests.backward.run import check_backward, draw, learned, training_inputs
from tests.corpus.case import Shape

SHAPE = Shape(2, 4, 2, 40, 52)
TILES = dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16)


def causal(b, h, q, k):
    return q + 12 >= k


@pytest.fixture(params=[False, True], ids=["usual", "deterministic"])
def deterministic(request) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def everything(device):
    """Elements of a pair, of a query, of a key, of a head, and of nothing; two places of one table."""
    tables = (
        draw(91, device=device),
        draw(4, 40, seed=1, device=device),
        draw(52, seed=2, device=device),
        draw(4, seed=3, device=device),
        torch.tensor(0.7, device=device, requires_grad=True),
    )

    def make(pairs, queries, keys, heads, one):
        def mod(score, b, h, q, k):
            return score * one + pairs[q - k + 51] + queries[h, q] * keys[k] + heads[h] * keys[k // 2]

        return mod

    return learned(make, *tables)


def test_gradients_are_right(device, deterministic):
    for options in (TILES, {"WRITE_DQ": False, **TILES}):
        check_backward(training_inputs(SHAPE, device), everything(device), causal, options=options)


def test_only_captured_gradients_are_wanted(device, deterministic):
    inputs = training_inputs(SHAPE, device)
    for tensor in inputs:
        tensor.requires_grad_(False)
    check_backward(inputs, everything(device), causal)


def test_two_runs_are_equal_to_the_last_bit(device):
    torch.use_deterministic_algorithms(True)
    try:
        runs = [run(device) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def run(device, shape=SHAPE):
    inputs, score = training_inputs(shape, device), everything(device)
    out = flexgen.compile(score.mod, causal, TILES)(*inputs)
    return torch.autograd.grad(out.square().sum(), [*inputs, *score.tensors])


def in_reversed_order(language, kernel, grid, values):
    position = language.builder.position
    position.extent = grid
    with np.errstate(all="ignore"):
        for index in reversed(list(itertools.product(*(range(extent) for extent in grid)))):
            position.index = index
            kernel(*values)


def test_order_of_programs_does_not_matter(deterministic, monkeypatch):
    """What a GPU does by chance, the interpreter does here on purpose."""
    device = torch.device("cpu")
    forwards = run(device)
    monkeypatch.setattr(interpret, "_run_grid", in_reversed_order)
    equal = all(torch.equal(one, other) for one, other in zip(forwards, run(device), strict=True))
    assert equal is deterministic


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e-6, 1.0, 3.7e5, 1e30])
def test_fixed_point_keeps_what_float32_keeps(magnitude):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * magnitude
    largest = values.abs().max()
    scale = scale_for(largest, len(values))
    total = torch.floor(values * scale + 0.5).to(torch.int64).sum()
    exact = values.double().sum()
    assert float((to_float(total, scale, largest) - exact).abs()) <= 1e-6 * float(largest)


def test_fixed_point_does_not_overflow():
    values = torch.full((1024,), 1.9999)
    scale = scale_for(values.max(), 1024)
    total = torch.floor(values * scale + 0.5).to(torch.int64).sum()
    assert float(to_float(total, scale, values.max())) == pytest.approx(1.9999 * 1024, rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_not_hidden(device, deterministic, bad):
    weights, inputs = draw(52, device=device), training_inputs(SHAPE, device)
    out = flexgen.compile(lambda score, b, h, q, k: score + weights[k])(*inputs)
    upstream = torch.ones_like(out)
    upstream[0, 0, 3, 5] = bad
    (grad,) = torch.autograd.grad(out, weights, upstream)
    assert not torch.isfinite(grad).all()
