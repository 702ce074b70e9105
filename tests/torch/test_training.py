"""A small GPT learns with flexgen as it does with attention written in torch."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional

import flexgen

VOCABULARY, WIDTH, HEADS, LENGTH = 17, 32, 2, 16


class CausalBias(nn.Module):
    """Causal attention with a learned bias per head and distance."""

    def __init__(self, use_flexgen: bool) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH))
        self.attention = flexgen.compile(self.score, self.mask) if use_flexgen else self.dense

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h, (q_idx - kv_idx).clamp(min=0)]

    def mask(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def dense(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        places = torch.arange(query.shape[2])
        distance = places[:, None] - places
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + self.bias[:, distance.clamp(min=0)]
        return torch.softmax(scores.masked_fill(distance < 0, -float("inf")), -1) @ value

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.project(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        return self.out(self.attention(*split.unbind(0)).transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self, use_flexgen: bool) -> None:
        super().__init__()
        self.attention = CausalBias(use_flexgen)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, use_flexgen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block(use_flexgen) for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def losses(use_flexgen: bool, steps: int, compiled: bool = False) -> list[float]:
    """Train on a sequence that is easy to learn, and return the loss of each step."""
    torch.manual_seed(0)
    model = Model(use_flexgen)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator, curve = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts = torch.randint(VOCABULARY, (1, 1), generator=generator)
        tokens = (starts + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        loss = functional.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def test_gpt_learns_as_with_dense_attention():
    found, expected = losses(True, 50), losses(False, 50)
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-4
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("steps", [6])
def test_compiled_gpt_learns_the_same(steps):
    torch._dynamo.reset()
    found, expected = losses(True, steps, compiled=True), losses(False, steps)
    assert max(abs(one - other) for one, other in zip(found, expected, strict=True)) < 1e-4
