"""Views whose values are not what lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flexgen

PLAIN = [torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def negative(tensor: Tensor) -> Tensor:
    """Return the same values as a view that torch negates whenever it reads it."""
    view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
    assert view.is_neg() and torch.equal(view, tensor)
    return view


@pytest.mark.parametrize("negated", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("is_warm", [False, True])
def test_inputs_that_torch_has_yet_to_negate(negated: tuple[int, ...], is_warm: bool) -> None:
    attention = flexgen.compile()
    given = [negative(tensor) if place in negated else tensor for place, tensor in enumerate(PLAIN)]
    strided = [torch.empty_strided(t.shape, t.stride()).copy_(t.resolve_neg()) for t in given]
    expected = flexgen.compile()(*PLAIN)
    for _ in range(3 if is_warm else 0):
        attention(*strided)
    for _ in range(3):
        assert torch.allclose(attention(*given), expected, atol=1e-6)
    assert torch.allclose(attention(*strided), expected, atol=1e-6)


def test_a_gradient_that_torch_has_yet_to_negate() -> None:
    query = PLAIN[0].clone().requires_grad_()
    output, weight = flexgen.compile()(query, *PLAIN[1:]), torch.randn(1, 2, 20, 16)
    expected = torch.autograd.grad(output, query, weight, retain_graph=True)
    found = torch.autograd.grad(output, query, negative(weight))
    assert torch.allclose(found[0], expected[0])


def test_a_captured_tensor_that_torch_has_yet_to_negate_is_refused() -> None:
    bias = torch.randn(20)
    attention = flexgen.compile(lambda score, b, h, q, k: score + bias[k])
    attention(*PLAIN)
    bias = negative(bias)
    with pytest.raises(flexgen.CaptureError, match=r"resolve_neg"):
        attention(*PLAIN)
