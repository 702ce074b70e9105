"""Causal attention: a query sees itself and what came before it."""

import flexgen
from flexgen.cli import run_file

SHAPE = (1, 4, 4, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


attention = flexgen.compile(mask_mod=mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
