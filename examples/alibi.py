"""ALiBi (https://arxiv.org/abs/2108.12409): causal, and each head pays its own price for each key of distance."""

import torch

import flexgen
from flexgen.cli import run_file

HEADS = 8
SHAPE = (1, HEADS, HEADS, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv


def score_mod(score, b, h, q_idx, kv_idx):
    slope = torch.exp2(-(h + 1) * (8.0 / HEADS))
    return score - slope * (q_idx - kv_idx)


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


attention = flexgen.compile(score_mod, mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
