"""Dense attention with dropout in float64, differentiable; and a seed that a call's generator draws."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.dropout.philox import keep_mask
from tests.reference import evaluate_mask, evaluate_score

Mod = Callable[..., Tensor]


def seeded(device: torch.device, number: int) -> tuple[torch.Generator, Tensor]:
    """Return a generator, and the seed and offset that the next call draws from it."""
    seed = torch.randint(
        0, 2**63 - 1, (2,), dtype=torch.int64, device=device, generator=torch.Generator(device).manual_seed(number)
    )
    return torch.Generator(device).manual_seed(number), seed


def dense_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float,
    seed: Tensor,
    score_mod: Mod | None = None,
    live: Mod | Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp in float64.

    Args:
        live: a mask_mod, or bool that broadcasts to [B, Hq, Lq, Lk].
    """
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    sizes = tuple(scores.shape)
    if score_mod is not None:
        scores = evaluate_score(score_mod, scores)
    if callable(live):
        live = evaluate_mask(live, sizes, query.device)
    if live is not None:
        scores = torch.where(live, scores, -float("inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*sizes[:3], 1)], dim=-1)
    logsumexp = scores.logsumexp(-1)
    empty = logsumexp == -float("inf")
    shifted = scores - torch.where(empty, 0.0, logsumexp)[..., None]
    weights = torch.where(empty[..., None], 0.0, shifted.exp())[..., : sizes[3]]
    kept = keep_mask(seed, p, sizes).to(query.device)
    return torch.where(kept, weights, 0.0) / (1 - p) @ value, logsumexp
