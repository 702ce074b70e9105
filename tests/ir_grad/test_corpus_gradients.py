"""Gradients of the score mods of the corpus, against autograd through the user's own callable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexgen.capture.live import LiveMods, Reading
from flexgen.ir.grad import score_grad
from flexgen.ir.grad_evaluate import evaluate_grad
from flexgen.ir.simplify import simplify
from tests.corpus.case import Case, Shape
from tests.corpus.scores import SCORES
from tests.reference import evaluate_score

SHAPE = Shape(2, 3, 3, 6, 6)
SIZES = (SHAPE.B, SHAPE.Hq, SHAPE.Lq, SHAPE.Lk)
CPU = torch.device("cpu")


def _inputs(scores: Tensor, grad: Tensor) -> dict[str, Tensor]:
    names = ("b", "h", "q_idx", "kv_idx")
    positions = {
        name: torch.arange(size).view([-1 if axis == other else 1 for other in range(4)])
        for axis, (name, size) in enumerate(zip(names, SIZES, strict=True))
    }
    return {"score": scores, "grad": grad, **positions}


def _reading_with_gradients(mod: LiveMods) -> Reading:
    """Read the mod anew after asking for the gradient of every floating tensor that it captured."""
    for tensor in mod.current(torch.float64).buffers:
        if tensor.dtype.is_floating_point:
            tensor.requires_grad_()
    return mod.current(torch.float64)


@pytest.mark.parametrize("case", list(SCORES), ids=lambda case: case.name)
def test_gradients_are_those_of_the_users_callable(case: Case) -> None:
    mod = case.build(SHAPE, CPU)
    reading = _reading_with_gradients(LiveMods(score_mod=mod))
    generator = torch.Generator().manual_seed(1)
    scores, upstream = torch.randn(2, *SIZES, generator=generator, dtype=torch.float64).mul(2).unbind()
    expected = _by_autograd(mod, scores, upstream, [each for each in reading.buffers if each.requires_grad])

    mods = simplify(reading.captured.mods).mods
    assert mods.score is not None
    wanted = frozenset(buffer.name for buffer in mods.score.buffers if buffer.requires_grad)
    tensors = dict(zip((buffer.name for buffer in reading.captured.mods.buffers), reading.buffers, strict=True))
    grad = score_grad(mods.score, wanted)
    scalars = dict(zip((scalar.name for scalar in mods.scalars), reading.scalars, strict=True))
    with torch.no_grad():
        found = evaluate_grad(grad, mods.score, _inputs(scores, upstream), tensors, scalars)
    _assert_close(found.dscore.expand(SIZES), expected[0])
    for (name, tensor), gradient in zip(_requiring_grad(tensors).items(), expected[1:], strict=True):
        _assert_close(found.buffers.get(name, torch.zeros_like(tensor)).to(tensor.dtype), gradient)


def _by_autograd(mod: object, scores: Tensor, upstream: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    scores = scores.clone().requires_grad_()
    result = evaluate_score(mod, scores)  # type: ignore[arg-type]
    if not result.requires_grad:
        return tuple(torch.zeros_like(each) for each in (scores, *leaves))
    return torch.autograd.grad(result, [scores, *leaves], upstream, allow_unused=True, materialize_grads=True)


def _requiring_grad(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare where autograd has a value; it lets the NaN of a branch that is not taken through."""
    assert actual.isfinite().all()
    actual, expected = actual[expected.isfinite()], expected[expected.isfinite()]
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[expected.dtype]
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=tolerance, atol=tolerance)
