"""Attention sinks: a logit per head in the softmax's denominator, forward and backward."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.torch.models import causal, softcap


def _reference(query, key, value, sinks, live, score=lambda scores: scores):
    """Return output and logsumexp from a softmax over the scores and one more column, whose value is nothing."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = score(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~live, -float("inf"))
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], dim=-1)
    return torch.softmax(scores, -1)[..., :-1] @ value, torch.logsumexp(scores, -1)


def _case(q_heads: int = 4, kv_heads: int = 2, length: int = 20, dtype=torch.float64):
    shapes = [(2, q_heads, length, 16), (2, kv_heads, length, 16), (2, kv_heads, length, 16), (q_heads,)]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def _compare(out, lse, expected, tensors, tolerance):
    torch.testing.assert_close(out.double(), expected[0].double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1].double(), rtol=tolerance, atol=tolerance)

    def gradients(out, lse):
        return torch.autograd.grad((out * out.sin()).sum() + lse.cos().sum(), tensors)

    for one, other in zip(gradients(out, lse), gradients(*expected), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def masked_rows(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx % 5 != 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_output_logsumexp_and_gradients(dtype):
    query, key, value, sinks = _case(dtype=dtype)
    places = torch.arange(20)
    live = (places[:, None] >= places) & (places[:, None] % 5 != 0)
    attention = flexgen.compile(softcap, masked_rows)
    out, aux = attention(query, key, value, sinks=sinks, return_aux=flexgen.AuxRequest(lse=True))
    expected = _reference(query, key, value, sinks, live, lambda scores: torch.tanh(scores / 3) * 3)
    _compare(out, aux.lse, expected, [query, key, value, sinks], 1e-9 if dtype == torch.float64 else 2e-4)
    assert torch.equal(aux.lse[0, :, 5].to(dtype), sinks.detach()) and not out[:, :, 5].any()


def test_layout_bshd():
    query, key, value, sinks = _case()
    live = torch.ones(20, 20, dtype=torch.bool).tril()
    attention = flexgen.compile(None, causal, {"layout": "bshd"})
    swapped = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out, aux = attention(*swapped, sinks=sinks, return_aux=flexgen.AuxRequest(lse=True))
    _compare(out.transpose(1, 2), aux.lse, _reference(query, key, value, sinks, live), [query, key, value, sinks], 1e-9)


def test_sink_of_minus_infinity_is_none():
    query, key, value, _ = _case()
    attention = flexgen.compile(None, masked_rows)
    request = flexgen.AuxRequest(lse=True)
    absent = torch.full((4,), -float("inf"), dtype=torch.float64)
    out, aux = attention(query, key, value, sinks=absent, return_aux=request)
    expected, expected_aux = attention(query, key, value, return_aux=request)
    assert torch.equal(out, expected) and torch.equal(aux.lse, expected_aux.lse)


def test_very_large_sink_leaves_nothing_and_stays_finite():
    query, key, value, _ = _case()
    sinks = torch.full((4,), 1e4, dtype=torch.float64, requires_grad=True)
    out = flexgen.compile(None, causal)(query, key, value, sinks=sinks)
    grads = torch.autograd.grad(out.sum(), [query, key, value, sinks])
    assert not out.any() and all(grad.isfinite().all() for grad in grads)


def test_output_keeps_the_dtype():
    query, key, value, sinks = _case(dtype=torch.bfloat16)
    assert flexgen.compile(None, causal)(query, key, value, sinks=sinks.float()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), "shape"),
        (torch.zeros(4, dtype=torch.int32), "floating"),
        (0.5, "floating"),
        (torch.zeros(4, 1), "shape"),
    ],
)
def test_wrong_sinks_are_refused(sinks, message):
    query, key, value, _ = _case()
    with pytest.raises(flexgen.FlexgenError, match=message):
        flexgen.compile(None, causal)(query, key, value, sinks=sinks)
