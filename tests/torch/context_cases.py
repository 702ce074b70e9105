"""Masks and score mods over whole sequences, and what one device computes of them, for tests of sharded sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import flexgen

HEAD_DIM = 16
CPU = torch.device("cpu")


class Documents(nn.Module):
    """Packed documents of uneven lengths, numbered by a captured tensor that all ranks have whole; causal inside."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("number", torch.arange(length).float().sqrt().mul(0.7).long())

    def mask(self, b, h, q_idx, kv_idx):
        return (self.number[q_idx] == self.number[kv_idx]) & (q_idx >= kv_idx)


class CappedBias(nn.Module):
    """A soft cap, and a learned bias for each head and distance, which reads positions of the whole."""

    def __init__(self, length: int, heads: int = 2) -> None:
        super().__init__()
        self.length = length
        self.bias = nn.Parameter(torch.randn(heads, 2 * length, generator=torch.Generator().manual_seed(1)))

    def score(self, score, b, h, q_idx, kv_idx):
        return 5.0 * torch.tanh(score / 5.0) + self.bias[h, q_idx - kv_idx + self.length]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 10)


def upside_down(b, h, q_idx, kv_idx):
    """Queries see later keys, the last of them none."""
    return kv_idx >= q_idx + 3


def per_batch_and_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 8 * (1 + b) + 5 * h)


def prefix_and_stripes(b, h, q_idx, kv_idx):
    """No interval: a prefix of three keys, and every fifth key."""
    return (kv_idx < 3) | ((kv_idx % 5 == 0) & (q_idx >= kv_idx))


MakeMods = Callable[[int, torch.device], tuple[Any, Any, list[Tensor]]]


@dataclass(frozen=True)
class Case:
    """A call to compare.

    Attributes:
        mods: (length, device) -> (score_mod, mask_mod, tensors that are captured and require grad).
        heads: of query, and of key and value.
        length: of the sequence; of the keys where they differ.
    """

    mods: MakeMods
    heads: tuple[int, int] = (2, 2)
    head_dim: int = HEAD_DIM
    batch: int = 1
    length: int = 64
    kv_length: int | None = None
    kv_batch: int | None = None
    layout: str = "bhsd"
    assignment: str = "head-tail"
    sinks: bool = False
    dtype: torch.dtype = torch.float32

    def tensors(self) -> list[Tensor]:
        """Return the whole query, key and value."""
        generator = torch.Generator().manual_seed(0)
        (q_heads, kv_heads), kv_length = self.heads, self.kv_length or self.length
        kv_batch = self.kv_batch or self.batch
        shapes = [(self.batch, q_heads, self.length), *[(kv_batch, kv_heads, kv_length)] * 2]
        made = [torch.randn(*shape, self.head_dim, generator=generator).to(self.dtype) for shape in shapes]
        if self.layout == "bshd":
            made = [tensor.transpose(1, 2).contiguous() for tensor in made]
        return [tensor.requires_grad_() for tensor in made]


def with_mask(mask: Callable[..., Any] | None) -> MakeMods:
    return lambda length, device: (None, mask, [])


def capped_bias(length: int, device: torch.device) -> tuple[Any, Any, list[Tensor]]:
    mods = CappedBias(length).to(device)
    return mods.score, causal, [mods.bias]


def documents(length: int, device: torch.device) -> tuple[Any, Any, list[Tensor]]:
    return None, Documents(length).to(device).mask, []


CASES = {
    "causal": Case(with_mask(causal), heads=(4, 2), batch=2),
    "causal, contiguous": Case(with_mask(causal), assignment="contiguous"),
    "window": Case(with_mask(window), length=128),
    "window, contiguous": Case(with_mask(window), length=128, assignment="contiguous"),
    "full": Case(with_mask(None), sinks=True),
    "documents": Case(documents, length=96),
    "soft cap, learned bias": Case(capped_bias, heads=(2, 1)),
    "rows without a key, layout bshd": Case(with_mask(upside_down), layout="bshd"),
    "per batch and head, one batch of keys": Case(with_mask(per_batch_and_head), batch=2, kv_batch=1),
    "no interval, other lengths of keys": Case(with_mask(prefix_and_stripes), kv_length=32),
    "bfloat16": Case(with_mask(causal), dtype=torch.bfloat16),
    "bfloat16, learned bias": Case(capped_bias, dtype=torch.bfloat16),
    "float64": Case(with_mask(causal), dtype=torch.float64),
}


def results(attend: Callable[..., Any], tensors: Sequence[Tensor], captured: Sequence[Tensor]) -> list[Tensor]:
    """Return output and logsumexp, and the gradients of a function of both."""
    output, aux = attend(*tensors)
    lse = torch.where(aux.lse.isinf(), 0.0, aux.lse)  # a query without a key has no gradient
    loss = (output.float() * output.float().sin()).sum() + lse.cos().sum()
    return [output, aux.lse, *torch.autograd.grad(loss, [*tensors, *captured])]


def compile_case(case: Case, device: torch.device = CPU) -> tuple[flexgen.Attention, list[Tensor]]:
    """Return the attention of a case, and what it captures that requires grad."""
    score_mod, mask_mod, captured = case.mods(max(case.length, case.kv_length or 0), device)
    return flexgen.compile(score_mod, mask_mod, {"layout": case.layout}), captured
