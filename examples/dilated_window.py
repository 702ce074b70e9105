"""Dilated window, as in Longformer (https://arxiv.org/abs/2004.05150): every DILATION-th key, REACH steps each way."""

import flexgen
from flexgen.cli import run_file

SHAPE = (1, 4, 4, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv
DILATION, REACH = 4, 16


def mask_mod(b, h, q_idx, kv_idx):
    distance = (q_idx - kv_idx).abs()
    return (distance % DILATION == 0) & (distance <= DILATION * REACH)


attention = flexgen.compile(mask_mod=mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
