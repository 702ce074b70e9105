"""A learned bias for each head and distance, as in T5 (https://arxiv.org/abs/1910.10683), clipped beyond REACH."""

import torch

import flexgen
from flexgen.cli import run_file

HEADS, REACH = 4, 32
SHAPE = (1, HEADS, HEADS, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

bias = torch.randn(HEADS, 2 * REACH + 1, device=DEVICE)


def score_mod(score, b, h, q_idx, kv_idx):
    distance = torch.clamp(kv_idx - q_idx, -REACH, REACH)
    return score + bias[h, distance + REACH]


attention = flexgen.compile(score_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
