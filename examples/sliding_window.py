"""Sliding window attention: a query sees itself and the WINDOW - 1 keys before it, at a cost linear in the length."""

import flexgen
from flexgen.cli import run_file

SHAPE = (1, 4, 4, 512, 512, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv
WINDOW = 128


def mask_mod(b, h, q_idx, kv_idx):
    causal = q_idx >= kv_idx
    near = q_idx - kv_idx < WINDOW
    return causal & near


attention = flexgen.compile(mask_mod=mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
