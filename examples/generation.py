"""Greedy generation as a Llama does it: grouped heads, rotary positions, a sliding window, a soft cap, a paged cache.

Prefill and decode steps are calls of one attention. The cache's pages are handed out as sequences grow, in any order;
kernels find them through the page table, and masks see positions in the sequence. Each token is compared with that of a
model that attends densely to all tokens again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import flexgen

WINDOW, CAP = 24, 20.0


@dataclass(frozen=True)
class Config:
    vocabulary: int = 64
    width: int = 64
    layers: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    max_pages: int = 4  # of one sequence


class PagedCache:
    """Keys and values of all layers in pages, and which pages belong to which sequence."""

    def __init__(self, config: Config, batch: int, device: torch.device) -> None:
        self.config = config
        n_pages = batch * config.max_pages
        shape = (config.layers, n_pages, config.kv_heads, config.page_size, config.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, device=device).unbind()
        self.free = torch.randperm(n_pages).tolist()  # any order will do
        self.page_table = torch.full((batch, config.max_pages), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)  # keys of each sequence, new ones included
        self.start = torch.zeros(batch, dtype=torch.int32, device=device)  # position of the first new token

    def grow(self, count: int) -> None:
        """Make room for `count` more tokens of each sequence."""
        self.start.copy_(self.lengths)
        self.lengths += count
        used = (self.start + self.config.page_size - 1) // self.config.page_size
        needed = (self.lengths + self.config.page_size - 1) // self.config.page_size
        for row, (first, last) in enumerate(zip(used.tolist(), needed.tolist(), strict=True)):
            for page in range(first, last):
                self.page_table[row, page] = self.free.pop()

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, Hkv, L, D] at their positions; return the layer's pages."""
        position = self.start[:, None] + torch.arange(key.shape[2], device=key.device)
        page = self.page_table.gather(1, (position // self.config.page_size).long()).long()
        place = (position % self.config.page_size).long()
        self.keys[layer][page, :, place] = key.transpose(1, 2)
        self.values[layer][page, :, place] = value.transpose(1, 2)
        return self.keys[layer], self.values[layer]


def rotary(tensor: Tensor, position: Tensor) -> Tensor:
    """Rotate pairs of dimensions of [B, H, L, D] by angles that grow with the position [B, L]."""
    half = tensor.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=tensor.device) / half)
    angle = (position[:, None, :, None] * frequency).to(tensor.dtype)
    left, right = tensor[..., :half], tensor[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


class Block(nn.Module):
    """Attention and a gated feed-forward layer; `attend(layer, query, key, value)` is whoever computes attention."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.q_heads + 2 * config.kv_heads
        self.norm_in, self.norm_out = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.project = nn.Linear(config.width, heads * config.head_dim, bias=False)
        self.merge = nn.Linear(config.q_heads * config.head_dim, config.width, bias=False)
        self.gate, self.up = (nn.Linear(config.width, 2 * config.width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, hidden: Tensor, position: Tensor, attend) -> Tensor:
        config, (batch, length, _) = self.config, hidden.shape
        heads = self.project(self.norm_in(hidden)).view(batch, length, -1, config.head_dim).transpose(1, 2)
        query, key, value = heads.split([config.q_heads, config.kv_heads, config.kv_heads], 1)
        output = attend(self.layer, rotary(query, position), rotary(key, position), value)
        hidden = hidden + self.merge(output.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norm_out(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, position: Tensor, attend) -> Tensor:
        """Return the logits that follow the last token, [B, vocabulary]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, position, attend)
        return self.head(self.norm(hidden[:, -1]))


def paged_attention(cache: PagedCache):
    """Return attention over a cache: the new tokens of each sequence attend to those before them."""

    def softcap(score, b, h, q_idx, kv_idx):
        return CAP * torch.tanh(score / CAP)

    def sliding_window(b, h, q_idx, kv_idx):
        distance = cache.start[b] + q_idx - kv_idx
        return (distance >= 0) & (distance < WINDOW)

    attention = flexgen.compile(softcap, sliding_window)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pages = cache.write(layer, key, value)
        return attention(query, *pages, kv_lengths=cache.lengths, page_table=cache.page_table)

    return attend


def dense_attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to all tokens of the sequences, without a cache."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    score = CAP * torch.tanh(query @ key.mT / query.shape[-1] ** 0.5 / CAP)
    index = torch.arange(query.shape[2], device=query.device)
    distance = index[:, None] - index
    score = score.masked_fill((distance < 0) | (distance >= WINDOW), -float("inf"))
    return score.softmax(-1) @ value


@torch.no_grad()
def generate(model: Model, config: Config, prompt: Tensor, count: int) -> tuple[Tensor, float]:
    """Return `count` more tokens [B, count], and the largest difference of logits from those of dense attention."""
    cache = PagedCache(config, prompt.shape[0], prompt.device)
    attend = paged_attention(cache)
    tokens, new, worst = prompt, prompt, 0.0
    for _ in range(count):
        cache.grow(new.shape[1])
        logits = model(new, cache.start[:, None] + torch.arange(new.shape[1], device=new.device), attend)
        everywhere = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        dense = model(tokens, everywhere, dense_attention)
        worst = max(worst, float((logits - dense).abs().max()))
        new = logits.argmax(-1, keepdim=True)
        if not torch.equal(new, dense.argmax(-1, keepdim=True)):
            raise AssertionError(f"token {tokens.shape[1]} differs from that of dense attention")
        tokens = torch.cat([tokens, new], 1)
    return tokens[:, prompt.shape[1] :], worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--dump-code", action="store_true", help="print the kernels of a decode step on sm_90")
    args = parser.parse_args()
    torch.manual_seed(0)
    config, device = Config(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.dump_code:
        print(decode_kernels(config))
        return
    model = Model(config).to(device)
    prompt = torch.randint(config.vocabulary, (2, 30), device=device)
    found, worst = generate(model, config, prompt, args.tokens)
    for row in found.tolist():
        print(*row)
    print(f"each token is that of dense attention; logits differ by {worst:.1e} at most")


def decode_kernels(config: Config) -> str:
    """Return the source of a decode step's kernels in bfloat16."""
    position = torch.zeros(2, dtype=torch.int32, device="meta")

    def sliding_window(b, h, q_idx, kv_idx):
        distance = position[b] + q_idx - kv_idx
        return (distance >= 0) & (distance < WINDOW)

    pages = torch.empty(8, config.kv_heads, config.page_size, config.head_dim, dtype=torch.bfloat16, device="meta")
    query = torch.empty(2, config.q_heads, 1, config.head_dim, dtype=torch.bfloat16, device="meta")
    table, lengths = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((2, config.max_pages), (2,)))
    attention = flexgen.compile(mask_mod=sliding_window)
    return attention.lower(query, pages, pages, target="sm_90", kv_lengths=lengths, page_table=table).source["forward"]


if __name__ == "__main__":
    main()
