"""The whole backward kernels behind tests/golden/kernels, one concept each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import flexgen
from flexgen.lowered import Lowered
from tests.goldens.kernels import SIZES, Sizes, causal_mask, offsets

Mods = tuple[Callable[..., Any] | None, Callable[..., Any] | None]


@dataclass(frozen=True, slots=True)
class BackwardCase:
    """Backward kernels of one concept.

    Attributes:
        build: returns (score_mod, mask_mod).
        wanted: which of query, key and value require grad.
        sequences: as in KernelCase.
    """

    build: Callable[[], Mods]
    sizes: Sizes = SIZES
    wanted: tuple[str, ...] = ("query", "key", "value")
    options: Mapping[str, Any] = field(default_factory=dict)
    dropout_p: float = 0.0
    sequences: int | None = None

    @property
    def name(self) -> str:
        return self.build.__name__

    def lower(self, target: str) -> Lowered:
        tensors = dict(zip(("query", "key", "value"), self.sizes.tensors(), strict=True))
        for name in self.wanted:
            tensors[name].requires_grad_()
        attention = flexgen.compile(*self.build(), self.options)
        return attention.lower(**tensors, target=target, dropout_p=self.dropout_p, **offsets(self.sequences))


def causal() -> Mods:
    return None, causal_mask


def softcap_and_learned_bias() -> Mods:
    cap, bias = 20.0, torch.zeros(4, 1024, requires_grad=True)

    def softcap(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap) + bias[h, kv_idx]

    return softcap, causal_mask


def learned_relative_positions() -> Mods:
    table = torch.zeros(2047, requires_grad=True)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + 1023]

    return relative, None


def documents() -> Mods:
    document_id = torch.zeros(1024, dtype=torch.int32)

    def document_mask(b, h, q_idx, kv_idx):
        return (document_id[q_idx] == document_id[kv_idx]) & (q_idx >= kv_idx)

    return None, document_mask


def dropout() -> Mods:
    return None, causal_mask


def values_alone() -> Mods:
    return None, causal_mask


def packed_sequences() -> Mods:
    slope = torch.zeros(16, 4, requires_grad=True)

    def learned_slope(score, b, h, q_idx, kv_idx):
        return score - slope[b, h] * (q_idx - kv_idx)

    return learned_slope, causal_mask


CASES = (
    BackwardCase(causal),
    BackwardCase(softcap_and_learned_bias, Sizes(Hq=4, Hkv=2)),
    BackwardCase(learned_relative_positions, Sizes(Lq=1000, Lk=1000)),
    BackwardCase(dropout, dropout_p=0.1),
    BackwardCase(values_alone, wanted=("value",)),
    BackwardCase(documents, Sizes(Hq=4, Hkv=2, Lq=1000, Lk=1000)),
    BackwardCase(packed_sequences, Sizes(B=1, Lq=4096, Lk=5000), sequences=16),
)
