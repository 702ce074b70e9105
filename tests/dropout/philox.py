"""Philox4x32-10 and dropout's pattern in numpy, written from the paper and docs/numerics.md alone."""

from __future__ import annotations

import numpy as np
import torch

Words = list[np.ndarray]


def philox(counter: list[object], key: list[object]) -> Words:
    """Return the four words, uint32, for counters and keys that broadcast."""
    x = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [np.asarray(word, dtype=np.uint64) for word in key]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        products = [x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)]
        (left_high, left_low), (right_high, right_low) = [(p >> shift, p & low) for p in products]
        x = [right_high ^ x[1] ^ k[0], right_low, left_high ^ x[3] ^ k[1], left_low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return [word.astype(np.uint32) for word in x]


def words_of_pairs(seed: int, offset: int, b, h, q_idx, kv_idx) -> np.ndarray:
    """Return the 32 bits that each pair draws; the indices are integer arrays that broadcast."""
    b, h, q_idx, kv_idx = (np.asarray(index, dtype=np.int64) for index in (b, h, q_idx, kv_idx))
    halves = [(number % 2**64 % 2**32, number % 2**64 // 2**32) for number in (seed, offset)]
    stream = philox([*halves[1], b, h], list(halves[0]))
    q_group, kv_group = (index // 16 * 8 + index % 8 for index in (q_idx, kv_idx))
    words = philox([kv_group, q_group, stream[2], stream[3]], stream[:2])
    own = (kv_idx // 8 % 2) + 2 * (q_idx // 8 % 2)
    shape = np.broadcast_shapes(own.shape, *(word.shape for word in words))
    return np.choose(np.broadcast_to(own, shape), [np.broadcast_to(word, shape) for word in words])


def keep_mask(
    seed: torch.Tensor, p: float, sizes: tuple[int, int, int, int], starts: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> torch.Tensor:
    """Return bool[B, Hq, Lq, Lk]: which weights are kept, for a seed tensor and indices that begin at `starts`."""
    axes = [start + np.arange(size) for start, size in zip(starts, sizes, strict=True)]
    b, h, q_idx, kv_idx = np.ix_(*axes)
    words = words_of_pairs(*seed.tolist(), b, h, q_idx, kv_idx)
    return torch.from_numpy(words.astype(np.int64) >= min(round(p * 2**32), 2**32 - 1))
