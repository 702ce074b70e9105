"""Dense attention in float64: mods are evaluated on broadcast index tensors, live pairs are those above -inf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mod = Callable[..., Any]


def indices(batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return b, h, q_idx and kv_idx, each along its own axis of [B, H, Lq, Lk]."""
    return (
        torch.arange(batch).view(-1, 1, 1, 1),
        torch.arange(heads).view(1, -1, 1, 1),
        torch.arange(queries).view(1, 1, -1, 1),
        torch.arange(keys).view(1, 1, 1, -1),
    )


def attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None, mask_mod: Mod | None) -> Tensor:
    """Return [B, Hq, Lq, Dv] in float64; a row without a live key is 0 and passes no gradient."""
    batch, heads, queries, dim = query.shape
    key, value = (t.double().repeat_interleave(heads // t.shape[1], 1) for t in (key, value))
    at = indices(batch, heads, queries, key.shape[2])
    score = query.double() @ key.mT / math.sqrt(dim)
    shape = score.shape
    if score_mod is not None:
        score = torch.as_tensor(score_mod(score, *at)).double().expand(shape)
    allowed = torch.ones((), dtype=torch.bool) if mask_mod is None else mask_mod(*at)
    live = allowed & (score > -math.inf)
    floor = torch.where(live, score.detach(), -math.inf).amax(-1, keepdim=True).clamp(min=-1e300)
    weight = torch.where(live, (torch.where(live, score, floor) - floor).exp(), 0.0)
    return (weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)) @ value


def worst_errors(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], score_mod: Mod | None, mask_mod: Mod | None, length: int = 40
) -> list[float]:
    """Return the largest errors of output, dQ, dK and dV, each against the size of the right one, at least 1."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    query, key, value = exact
    output, right = attend(*inputs), attention(query, key, value, score_mod, mask_mod)
    weight = torch.randn(right.shape)
    found = (output, *torch.autograd.grad((output * weight).sum(), inputs, materialize_grads=True))
    wanted = (right, *torch.autograd.grad((right * weight).sum(), exact, materialize_grads=True))
    return [
        float(((a - b).abs().max() / b.abs().max().clamp(min=1)).detach()) for a, b in zip(found, wanted, strict=True)
    ]
