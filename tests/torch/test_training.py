"""A small GPT learns with flexgen as it does with attention written in torch."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from benchmarks.gpt import Size, train, with_dense, with_flexgen
from benchmarks.train_gpt import largest_difference

SMALL = Size(vocabulary=17, width=32, heads=2, layers=2, length=16)


def test_gpt_learns_as_with_dense_attention():
    found, expected = (train(SMALL, make, 50) for make in (with_flexgen, with_dense))
    assert largest_difference(found, expected) < 1e-4
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("steps", [6])
def test_compiled_gpt_learns_the_same(steps):
    torch._dynamo.reset()
    compiled = train(
        SMALL, with_flexgen, steps, compiler=lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")
    )
    assert largest_difference(compiled, train(SMALL, with_dense, steps)) < 1e-4


def test_gpt_under_autocast_stays_near():
    found, expected = (train(SMALL, make, 6, autocast=torch.bfloat16) for make in (with_flexgen, with_dense))
    assert largest_difference(found, expected) < 0.05
