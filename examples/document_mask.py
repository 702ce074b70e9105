"""Documents of different lengths packed into one sequence: a token sees what came before it in its own document."""

import torch

import flexgen
from flexgen.cli import run_file

LENGTHS = [100, 17, 203, 64, 128]
SHAPE = (1, 4, 4, sum(LENGTHS), sum(LENGTHS), 64, 64)  # B, Hq, Hkv, Lq, Lk, Dqk, Dv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(lengths):
    document_id = torch.repeat_interleave(torch.tensor(lengths)).to(DEVICE)

    def document_mask(b, h, q_idx, kv_idx):
        same_document = document_id[q_idx] == document_id[kv_idx]
        return same_document & (q_idx >= kv_idx)

    return document_mask


mask_mod = packed(LENGTHS)

attention = flexgen.compile(mask_mod=mask_mod)  # out = attention(query, key, value)


if __name__ == "__main__":
    raise SystemExit(run_file(__file__))
