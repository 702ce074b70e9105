"""max_scores has no gradient: a loss without it trains, and one that needs it is refused, however the call is made."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

import flexgen
from tests.torch.models import assert_same, causal, draw, softcap

REQUEST = flexgen.AuxRequest(lse=True, max_scores=True)
HOWS = ["eager", "dynamo", "aot_eager"]


def call(how: str):
    torch._dynamo.reset()
    attention = flexgen.compile(softcap, causal)

    def attend(*tensors):
        output, aux = attention(*tensors, return_aux=REQUEST)
        return output, aux.max_scores

    backend = {"dynamo": "eager", "aot_eager": "aot_eager"}.get(how)
    return torch.compile(attend, fullgraph=True, backend=backend) if backend else attend


@pytest.mark.parametrize("how", HOWS)
def test_loss_may_leave_it_out(how):
    attend, inputs = call(how), draw()
    for _ in range(2):
        output, max_scores = attend(*inputs)
        assert max_scores.requires_grad
        grads = torch.autograd.grad(output.sin().sum(), inputs)
        plain = flexgen.compile(softcap, causal)(*inputs)
        assert_same(grads, torch.autograd.grad(plain.sin().sum(), inputs))


@pytest.mark.parametrize("how", HOWS)
def test_loss_that_needs_it_is_refused(how):
    output, max_scores = call(how)(*draw())
    with pytest.raises(flexgen.UnsupportedProblemError, match="loss depends on max_scores"):
        (output.sum() + max_scores.sum()).backward()
    output, max_scores = call(how)(*draw())
    with pytest.raises(flexgen.UnsupportedProblemError, match="loss depends on max_scores"):
        max_scores.sum().backward()
    output, max_scores = call(how)(*draw())
    (output.sum() * max_scores.detach().sum()).backward()


def test_loss_inside_of_the_compiled_function():
    torch._dynamo.reset()
    attention = flexgen.compile(softcap, causal)

    def loss(weight, *tensors):
        output, aux = attention(*tensors, return_aux=REQUEST)
        return output.sum() + weight * aux.max_scores.sum()

    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(flexgen.UnsupportedProblemError, match="loss depends on max_scores"):
        traced(torch.ones(()), *draw()).backward()


def test_transforms():
    attention, inputs = flexgen.compile(softcap, causal), [tensor.detach() for tensor in draw()]

    def loss(query, weight):
        output, aux = attention(query, *inputs[1:], return_aux=REQUEST)
        return output.sum() + (weight * aux.max_scores.sum() if weight else 0)

    assert torch.func.grad(loss)(inputs[0], 0).abs().sum() > 0
    with pytest.raises(flexgen.UnsupportedProblemError, match="loss depends on max_scores"):
        torch.func.grad(loss)(inputs[0], 1)
