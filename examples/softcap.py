"""Soft-capped scores, as in Gemma 2 (https://arxiv.org/abs/2408.00118): no score leaves [-CAP, CAP]."""

import torch

import flexgen
from flexgen.cli import run_file

SHAPE = (1, 4, 4, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv
CAP = 20.0


def score_mod(score, b, h, q_idx, kv_idx):
    return CAP * torch.tanh(score / CAP)


attention = flexgen.compile(score_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
