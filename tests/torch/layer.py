"""A self-attention layer that owns a learned bias, and one training step of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import flexgen

HEADS, HEAD_DIM, REACH = 4, 16, 16
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    """Causal self-attention with a bias per head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * REACH))
        self.attention = flexgen.compile(self.score, self.mask)

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h, q_idx - kv_idx + REACH]

    def mask(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def forward(self, x: Tensor) -> Tensor:
        heads = [project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.query, self.key, self.value)]
        found = self.attention(*(tensor.transpose(1, 2) for tensor in heads))
        return self.out(found.transpose(1, 2).flatten(2))


def seeded(make, *arguments):
    """Call with torch's seed at 0, so that each rank makes the same."""
    torch.manual_seed(0)
    return make(*arguments)


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of all parameters, in order, of a mean over the batch."""
    model.zero_grad()
    output = model(x)
    (output * output.sin()).flatten(1).sum(1).mean().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters())]
