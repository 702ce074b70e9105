"""Neighbourhood attention on an image (https://arxiv.org/abs/2204.07143): a pixel sees the square around it."""

import flexgen
from flexgen.cli import run_file

HEIGHT, WIDTH, RADIUS = 16, 20, 3
SHAPE = (1, 4, 4, HEIGHT * WIDTH, HEIGHT * WIDTH, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv


def mask_mod(b, h, q_idx, kv_idx):
    rows_apart = (q_idx // WIDTH - kv_idx // WIDTH).abs()
    columns_apart = (q_idx % WIDTH - kv_idx % WIDTH).abs()
    return (rows_apart <= RADIUS) & (columns_apart <= RADIUS)


attention = flexgen.compile(mask_mod=mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
