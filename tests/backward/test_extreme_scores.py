"""Rows whose scores are huge and nearly equal: the logsumexp alone would round their weights away."""

from __future__ import annotations

import pytest
import torch

import flexgen


@pytest.mark.parametrize("fill", [-1e9, 1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_filled_with_one_huge_score_share_their_weight(fill, compiled):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))

    def padded_rows(score, b, h, q_idx, kv_idx):
        return score + torch.where(q_idx >= 5, 0.0, fill)

    attention = flexgen.compile(padded_rows)
    call = torch.compile(lambda *args: attention(*args), fullgraph=True, backend="aot_eager") if compiled else attention
    output = call(query, key, value)
    rows, columns = torch.arange(40).view(40, 1), torch.arange(40).view(1, 40)
    eager = padded_rows(query @ key.mT / 4, None, None, rows, columns).softmax(-1) @ value
    grad_output = torch.randn_like(output)
    found, expected = (torch.autograd.grad(out, (query, key, value), grad_output) for out in (output, eager))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=1e-5)
