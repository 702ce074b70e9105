"""Grouped-query attention (https://arxiv.org/abs/2305.13245): four query heads share each key and value head."""

import flexgen
from flexgen.cli import run_file

SHAPE = (1, 8, 2, 256, 256, 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv


def mask_mod(b, h, q_idx, kv_idx):  # h counts query heads
    return q_idx >= kv_idx


attention = flexgen.compile(mask_mod=mask_mod)  # the tensors' heads tell the groups: out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
