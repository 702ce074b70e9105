"""Inputs and modules that the tests of torch's own machinery share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import flexgen


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def softcap(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / 3) * 3


def draw(length: int = 16, *, head_dim: int = 16, heads: int = 2, seed: int = 0, **options: object) -> list[Tensor]:
    """Return query, key and value that require grad."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, heads, length, head_dim)
    return [torch.randn(shape, generator=generator).to(**options).requires_grad_() for _ in range(3)]


class BiasedAttention(nn.Module):
    """Attention with a learned bias per head and distance, a window and a cap, all attributes of the module."""

    def __init__(self, options: dict[str, object] | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 64, generator=torch.Generator().manual_seed(1)))
        self.window = 7
        self.cap = 3.5
        self.attention = flexgen.compile(self.score, self.mask, options)

    def score(self, score, b, h, q_idx, kv_idx):
        return torch.tanh(score / self.cap) * self.cap + self.bias[h, q_idx - kv_idx + 32]

    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= self.window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value)


def run_with_gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], also: Sequence[Tensor] = ()):
    """Return the output and the gradients of a function of it, in the inputs and in other tensors."""
    out = call(*inputs)
    return [out.detach(), *torch.autograd.grad((out * out.sin()).sum(), [*inputs, *also])]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
