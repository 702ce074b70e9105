"""Prefix language model: everything sees the prompt, whose length differs by batch; the rest is causal."""

import torch

import flexgen
from flexgen.cli import run_file

SHAPE = (2, 4, 4, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

prefix_length = torch.tensor([40, 150], device=DEVICE)


def mask_mod(b, h, q_idx, kv_idx):
    in_prefix = kv_idx < prefix_length[b]
    return in_prefix | (q_idx >= kv_idx)


attention = flexgen.compile(mask_mod=mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
