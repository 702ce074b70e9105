"""Rows without a live key, scores of -inf, large magnitudes, and the gradient through the logsumexp."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import check_backward, draw, learned, training_inputs
from tests.corpus.case import Shape
from tests.forward.run import Inputs, random_inputs, refusal, square

INFINITE = float("inf")


def causal(b, h, q, k):
    return q >= k


def some_rows_are_empty(b, h, q, k):
    return (q >= 4) & (k <= q) & (q % 5 != 0)


@pytest.mark.parametrize("options", [{}, {"BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16}])
def test_segments_with_rows_that_see_nothing(device, options):
    """The second half sees ever more of the first; every group's leader sees nothing."""
    t = 64

    def mask(b, h, q, k):
        row = q - t
        band = (q < t) & (q >= k) & (q - k < 4)
        grouped = (q >= t) & (k < 4 * (row // 4)) & (row % 4 != 0) & (k < t)
        return band | grouped

    inputs = training_inputs(square(2 * t), device)
    query, key, value = check_backward(inputs, None, mask, options=options)
    assert not key[:, :, t:].any()
    assert not value[:, :, t:].any()
    assert not query[:, :, t::4].any()


@pytest.mark.parametrize("length", [8, 70])
def test_rows_without_a_live_key_get_no_gradient(device, length):
    grads = check_backward(training_inputs(square(length), device), None, some_rows_are_empty, use_lse=True)
    assert not grads[0][:, :, ::5].any()


def test_no_row_has_a_live_key(device):
    grads = check_backward(training_inputs(square(20), device), None, lambda b, h, q, k: k < 0, use_lse=True)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(("length", "rows"), [(8, True), (96, False)])
def test_score_mod_drops_keys_with_minus_infinity(device, length, rows):
    """Whole rows at -inf, and first tiles of keys at -inf for every row."""

    def mod(score, b, h, q, k):
        return torch.where(q >= 4 if rows else k >= 60, score, -INFINITE)

    tiles = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 16)
    check_backward(training_inputs(square(length), device), mod, options=tiles, use_lse=True)


@pytest.mark.parametrize("lowest", [-INFINITE, torch.finfo(torch.float32).min, -1e30])
def test_additive_masks_of_any_depth(device, lowest):
    inputs = training_inputs(square(40), device)
    bias = torch.zeros(40, device=device)
    bias[::3] = lowest
    check_backward(inputs, lambda score, b, h, q, k: score + bias[k], causal)


def test_learned_bias_where_others_are_minus_infinity(device):
    live = torch.arange(40, device=device) % 3 != 0
    bias = draw(40, device=device)
    make = lambda t: lambda score, b, h, q, k: torch.where(live[k], score + t[k], -INFINITE)  # noqa: E731
    (*_, grad) = check_backward(training_inputs(square(40), device), learned(make, bias), some_rows_are_empty)
    assert not grad[::3].any()


# Magnitudes.


def test_softmax_over_one_key_has_no_gradient(device):
    """It is constant, also for scores of 30 in half precision; what is left is the order of two sums."""
    inputs = training_inputs(square(1), device, dtype=torch.float16, spread=3.0)
    out = flexgen.compile()(*inputs)
    grad_output = torch.randn_like(out)
    query, key, value = torch.autograd.grad(out, list(inputs), grad_output)
    assert float(query.abs().max()) < 1e-5
    assert float(key.abs().max()) < 1e-5
    torch.testing.assert_close(value, grad_output)


def test_large_scores_with_few_keys(device):
    """256 queries on 3 keys, aligned at the end, so that most rows see all or nothing."""
    inputs = training_inputs(Shape(1, 1, 1, 256, 3), device, dtype=torch.float16, spread=3.0)
    grads = check_backward(inputs, None, lambda b, h, q, k: q + 3 - 256 >= k)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_scores_far_from_zero(device, shift):
    check_far(training_inputs(square(24), device), lambda score, b, h, q, k: score + shift)


def check_far(inputs, mod):
    """Softmax ignores a shift; float32 resolves scores near 1e4 to 1e-3."""
    shifted = torch.autograd.grad(flexgen.compile(mod, causal)(*inputs).sum(), list(inputs))
    plain = torch.autograd.grad(flexgen.compile(None, causal)(*inputs).sum(), list(inputs))
    for one, other in zip(shifted, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


# Auxiliary outputs in the loss.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_of_output_and_logsumexp(device, dtype):
    """Loss = (out * exp(lse)).sum() + lse.sum()."""
    inputs = training_inputs(square(40), device, dtype=dtype)
    check_backward(inputs, None, causal, use_lse=True)
    if dtype == torch.float32:
        check_exponential_loss(inputs)


def check_exponential_loss(inputs):
    def loss(query, key, value, attend):
        out, lse = attend(query, key, value)
        return (out * lse.exp()[..., None]).sum() + lse.sum()

    def dense(query, key, value):
        score = (query @ key.mT) * 0.25
        length = score.shape[-1]
        score = score.masked_fill(torch.ones(length, length, device=score.device).tril() == 0, -INFINITE)
        return torch.softmax(score, -1) @ value, score.logsumexp(-1)

    def ours(query, key, value):
        out, aux = flexgen.compile(None, causal)(query, key, value, return_aux=flexgen.AuxRequest(lse=True))
        return out, aux.lse

    exact = Inputs(*(t.detach().double().requires_grad_() for t in inputs))
    expected = torch.autograd.grad(loss(*exact, dense), list(exact))
    for one, other in zip(torch.autograd.grad(loss(*inputs, ours), list(inputs)), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_loss_of_the_logsumexp_alone(device):
    inputs = training_inputs(square(24), device)
    _, aux = flexgen.compile(None, causal)(*inputs, return_aux=flexgen.AuxRequest(lse=True))
    query, key, value = torch.autograd.grad(aux.lse.sum(), list(inputs))
    exact = (inputs.query.double() @ inputs.key.double().mT * 0.25).masked_fill(
        torch.ones(24, 24, device=device).tril() == 0, -INFINITE
    )
    expected = torch.autograd.grad(exact.logsumexp(-1).sum(), [inputs.query, inputs.key])
    torch.testing.assert_close(query, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(key, expected[1], rtol=1e-5, atol=1e-5)
    assert not value.any()


def test_infinite_entries_of_the_logsumexp_pass_no_gradient(device):
    """The loss reads the -inf entries too: their gradient goes nowhere instead of making NaN."""
    inputs = training_inputs(square(20), device)
    out, aux = flexgen.compile(None, some_rows_are_empty)(*inputs, return_aux=flexgen.AuxRequest(lse=True))
    grads = torch.autograd.grad((aux.lse * 0.5).sum() + out.sum(), list(inputs))
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_loss_of_max_scores_is_refused(device):
    inputs = training_inputs(square(16), device)
    _, aux = flexgen.compile()(*inputs, return_aux=flexgen.AuxRequest(max_scores=True))
    refusal(lambda: aux.max_scores.sum().backward(), flexgen.UnsupportedProblemError, "max_scores", "detach")


def test_max_scores_beside_a_loss_of_the_output(device):
    inputs = training_inputs(square(16), device)
    out, aux = flexgen.compile(None, causal)(*inputs, return_aux=flexgen.AuxRequest(lse=True, max_scores=True))
    (out.sum() + aux.lse.sum() + aux.max_scores.detach().sum()).backward()
    plain = training_inputs(square(16), device)
    assert torch.equal(plain.query, inputs.query)
    out, aux = flexgen.compile(None, causal)(*plain, return_aux=flexgen.AuxRequest(lse=True))
    (out.sum() + aux.lse.sum()).backward()
    assert torch.equal(plain.query.grad, inputs.query.grad)


def test_logsumexp_is_not_returned_unless_asked_for(device):
    inputs = training_inputs(square(16), device)
    _, aux = flexgen.compile()(*inputs, return_aux=flexgen.AuxRequest(max_scores=True))
    assert aux.lse is None
    _, aux = flexgen.compile()(*random_inputs(square(16), device), return_aux=flexgen.AuxRequest(lse=True))
    assert not aux.lse.requires_grad
