"""Rows whose scores are huge and nearly equal: the logsumexp alone would round their weights away."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.fuzzing.check import check_call
from flexgen.fuzzing.inputs import drawn


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


ROW, HEAD, BY_KEY = (torch.full((size,), -1e9) for size in (130, 4, 130))
ADDED = {
    "of a row": lambda score, b, h, q, k: score + ROW[q],
    "of a head": lambda score, b, h, q, k: score + HEAD[h],
    "of a key": lambda score, b, h, q, k: score - BY_KEY.long()[k],
    "of all": lambda score, b, h, q, k: score + HEAD.sum(),
    "of a row, whole": lambda score, b, h, q, k: score + ROW.long()[q] * 2,
    "of an index": lambda score, b, h, q, k: score + q * 1_000_000,
    "instead of scores": lambda score, b, h, q, k: torch.where(h < 2, ROW[q], score),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_whole_rows_may_be_of_any_size(name: str, dtype: str):
    query, key, value = (drawn((1, 4, 130, 16), dtype, seed, requires_grad=True) for seed in range(3))
    check_call(flexgen.compile(ADDED[name]), query, key, value, backward=True)


@pytest.mark.parametrize("added", ["a number", "an index"])
@pytest.mark.parametrize("size", [1e4, 1e5, 1e6, 1e7])
def test_large_scores_weigh_as_float32_rounds_them(size: float, added: str):
    """What float32 has rounded away is gone; nothing more may be lost, in half precision either."""

    def score_mod(score, b, h, q, k):
        return score + (size if added == "a number" else q * (size / 64))

    inputs = [drawn((1, 2, 64, 16), "bfloat16", seed, requires_grad=True) for seed in range(3)]
    output = flexgen.compile(score_mod)(*inputs)
    weight = drawn((1, 2, 64, 16), "bfloat16", 9)
    exact = [it.detach().float().requires_grad_() for it in inputs]
    rows = torch.arange(64).view(64, 1)
    right = score_mod(exact[0] @ exact[1].mT / 4, None, None, rows, None).softmax(-1) @ exact[2]
    found = (output, *torch.autograd.grad(output, inputs, weight))
    wanted = (right, *torch.autograd.grad(right, exact, weight.float()))
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.float() - theirs).detach().norm() / theirs.detach().norm()) < 4e-3
