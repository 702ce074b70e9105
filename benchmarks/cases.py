"""The attention problems that benchmarks time: mods as a user writes them, and how many pairs each leaves live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Mod = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One problem.

    Attributes:
        name: as in result tables.
        score_mod, mask_mod: the user's callables, or None.
        live_pairs: (query, key) pairs of one head that the mask keeps.
        is_causal: whether scaled_dot_product_attention computes it with is_causal; None where it cannot.
    """

    name: str
    score_mod: Mod | None
    mask_mod: Mod | None
    live_pairs: int
    is_causal: bool | None


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size: int) -> Mod:
    def sliding_window(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return sliding_window


def prefix(length: int) -> Mod:
    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < length) | (q_idx >= kv_idx)

    return prefix_lm


def documents(document_id: torch.Tensor) -> Mod:
    def document_causal(b, h, q_idx, kv_idx):
        return (document_id[q_idx] == document_id[kv_idx]) & (q_idx >= kv_idx)

    return document_causal


def softcap(limit: float) -> Mod:
    def soft_capped(score, b, h, q_idx, kv_idx):
        return limit * torch.tanh(score / limit)

    return soft_capped


def alibi(slopes: torch.Tensor) -> Mod:
    def alibi_bias(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi_bias


def cases(length: int, heads: int, device: str) -> list[Case]:
    """Return the eight cases for one sequence length."""
    triangle = length * (length + 1) // 2
    document_length = length // 16
    document_id = (torch.arange(length, device=device) // document_length).to(torch.int32)
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    return [
        Case("none", None, None, length * length, False),
        Case("causal", None, causal, triangle, True),
        Case("window 1024", None, window(1024), _band(length, 1024), None),
        Case("window 256", None, window(256), _band(length, 256), None),
        Case("prefix 2048", None, prefix(2048), triangle + 2048 * 2047 // 2, None),
        Case("16 documents", None, documents(document_id), 16 * _band(document_length, document_length), None),
        Case("softcap 30", softcap(30.0), causal, triangle, None),
        Case("alibi", alibi(slopes), causal, triangle, None),
    ]


def _band(length: int, size: int) -> int:
    """Pairs with 0 <= q - k <= size."""
    full = min(size + 1, length)
    return full * (full + 1) // 2 + max(length - full, 0) * full
