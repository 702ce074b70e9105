"""A small GPT whose attention has a learned bias per head and distance, and a training run of it.

The attention comes from outside, so that the same model trains with flexgen and with what it is compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexgen

STRIDES = 2  # of the sequences to learn, 1 and 2; two tokens tell which, so a model must look back

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value: [B, H, L, D]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a model.

    Attributes:
        length: tokens of a sequence.
    """

    vocabulary: int
    width: int
    heads: int
    layers: int
    length: int


class CausalBias(nn.Module):
    """Causal self-attention with a learned bias per head and distance.

    Args:
        make: returns what attends, given this layer, whose `score` and `mask` say how.
    """

    def __init__(self, size: Size, make: Callable[[CausalBias], Attend]) -> None:
        super().__init__()
        self.size = size
        self.project = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.bias = nn.Parameter(torch.zeros(size.heads, size.length))
        self.attend = make(self)

    def score(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.bias[h, (q_idx - kv_idx).clamp(min=0)]

    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    def forward(self, x: Tensor) -> Tensor:
        split = self.project(x).unflatten(-1, (3, self.size.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*split.unbind(0)).transpose(1, 2).flatten(2))


def with_flexgen(layer: CausalBias) -> Attend:
    return flexgen.compile(layer.score, layer.mask)


def with_dense(layer: CausalBias) -> Attend:
    """Return attention in plain torch operations, with the matrix of scores in memory."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, columns = (torch.arange(tensor.shape[2], device=query.device) for tensor in (query, key))
        indices = (torch.zeros((), dtype=torch.int64), torch.arange(query.shape[1]), rows, columns)
        shapes = ((1, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, -1))
        b, h, q_idx, kv_idx = (index.to(query.device).view(shape) for index, shape in zip(indices, shapes, strict=True))
        scores = layer.score(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, b, h, q_idx, kv_idx)
        return torch.softmax(scores.masked_fill(~layer.mask(b, h, q_idx, kv_idx), -torch.inf), -1) @ value

    return attend


def with_torch_flex(layer: CausalBias) -> Attend:
    """Return torch.compile(flex_attention) with a block mask made once, on a GPU."""
    length = layer.size.length

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    blocks = create_block_mask(causal, None, None, length, length, "cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bias = layer.bias

        def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + bias[h, (q_idx - kv_idx).clamp(min=0)]

        # By default its loads of the bias are staged too, and its kernel then asks for more shared memory than an H200
        # has: 245760 bytes of 232448.
        return compiled(query, key, value, score_mod=score, block_mask=blocks, kernel_options={"num_stages": 1})

    return attend


class Block(nn.Module):
    def __init__(self, size: Size, make: Callable[[CausalBias], Attend]) -> None:
        super().__init__()
        width = size.width
        self.attention = CausalBias(size, make)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """tokens [B, L] -> logits [B, L, vocabulary]."""

    def __init__(self, size: Size, make: Callable[[CausalBias], Attend]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*(Block(size, make) for _ in range(size.layers)))
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def train(
    size: Size,
    make: Callable[[CausalBias], Attend],
    steps: int,
    *,
    batch: int = 1,
    rate: float = 3e-3,
    device: str = "cpu",
    autocast: torch.dtype | None = None,
    compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None,
) -> list[float]:
    """Train from seed 0 on arithmetic sequences, the same in every run, and return each step's loss.

    Args:
        rate: the learning rate.
        autocast: the dtype that torch.autocast computes matrix products in; by default none.
        compiler: what to pass the model through.
    """
    torch.manual_seed(0)
    model = GPT(size, make).to(device)
    forward = compiler(model) if compiler else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator, curve = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts, strides = (torch.randint(size.vocabulary, (batch, 1), generator=generator) for _ in range(2))
        tokens = ((starts + (1 + strides % STRIDES) * torch.arange(size.length + 1)) % size.vocabulary).to(device)
        computing = torch.autocast(device, autocast) if autocast else contextlib.nullcontext()
        with computing:
            logits = forward(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve
