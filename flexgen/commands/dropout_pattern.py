"""Which pairs dropout keeps, computed with torch operations as docs/numerics.md says: what `check` judges by."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen.runtime.dropout import Dropout
from flexgen.runtime.mask_evaluation import IndexBox

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def kept_pairs(dropout: Dropout, box: IndexBox) -> Tensor:
    """Return bool[len(q_idx), len(kv_idx)] for a box of one batch and one head: which weights are kept."""
    seed = dropout.seed
    b, h, q_idx, kv_idx = box.tensors(seed.device)
    key_0, key_1, word_2, word_3 = _philox((*_halves(seed[1]), b[0], h[0]), _halves(seed[0]))
    q, kv = _without_bit_3(q_idx)[:, None], _without_bit_3(kv_idx)[None, :]
    shape = (len(box.q_idx), len(box.kv_idx))
    words = torch.stack([word.expand(shape) for word in _philox((kv, q, word_2, word_3), (key_0, key_1))])
    own = (kv_idx[None, :] >> 3 & 1) + 2 * (q_idx[:, None] >> 3 & 1)
    return words.gather(0, own[None])[0] >= dropout.numbers()["drop_below"]


def _without_bit_3(index: Tensor) -> Tensor:
    return index // 16 * 8 + index % 8


def _halves(number: Tensor) -> tuple[Tensor, Tensor]:
    return number & _MASK, number >> 32 & _MASK


def _philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four words of Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    Words are int64 below 2**32; products wrap at 64 bits, of which both halves are right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (right >> 32 & _MASK) ^ c1 ^ k0, right & _MASK
        c2, c3 = (left >> 32 & _MASK) ^ c3 ^ k1, left & _MASK
        k0, k1 = k0 + _KEY_STEPS[0] & _MASK, k1 + _KEY_STEPS[1] & _MASK
    return c0, c1, c2, c3
