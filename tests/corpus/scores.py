"""The score mods of the corpus, each written the way its users write it."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tests.corpus.case import Corpus, Mod, Shape, random_ints, random_values

SCORES = Corpus()


@SCORES.add()
def identity(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score


# Positions.


@SCORES.add("heads")
def alibi(shape: Shape, device: torch.device) -> Mod:
    slopes = torch.exp2(-8.0 * torch.arange(1, shape.Hq + 1, device=device) / shape.Hq)

    def alibi_bias(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return alibi_bias


@SCORES.add()
def alibi_from_head_index(shape: Shape, device: torch.device) -> Mod:
    heads = shape.Hq

    def alibi_mod(score, b, h, q_idx, kv_idx):
        slope = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * slope

    return alibi_mod


@SCORES.add()
def relative_bias_table(shape: Shape, device: torch.device) -> Mod:
    table = random_values(shape.Lq + shape.Lk - 1, seed=11, device=device)
    last_key = shape.Lk - 1

    def relative_bias(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + last_key]

    return relative_bias


@SCORES.add("heads")
def t5_bucketed_bias(shape: Shape, device: torch.device) -> Mod:
    num_buckets, max_distance = 16, 50
    table = random_values(num_buckets, shape.Hq, seed=12, device=device)

    def bucket(distance):
        half = num_buckets // 2
        side = (distance > 0).to(torch.int64) * half
        distance = distance.abs()
        exact = half // 2
        spread = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
        far = exact + (spread * (half - exact)).to(torch.int64)
        return side + torch.where(distance < exact, distance, far.clamp(max=half - 1))

    def t5_bias(score, b, h, q_idx, kv_idx):
        return score + table[bucket(kv_idx - q_idx), h]

    return t5_bias


@SCORES.add()
def rope_distance(shape: Shape, device: torch.device) -> Mod:
    frequency = 0.37

    def mod(score, b, h, q_idx, kv_idx):
        angle = (q_idx - kv_idx) * frequency
        return score * torch.cos(angle) + torch.sin(angle)

    return mod


@SCORES.add()
def log_distance(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return score - 0.5 * torch.log1p(distance.float()) - (distance + 1.0).log2() * 0.1

    return mod


# Shapes of the score itself.


def tanh_softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, soft_cap: float) -> Tensor:
    return soft_cap * torch.tanh(score / soft_cap)


@SCORES.add()
def softcap(shape: Shape, device: torch.device) -> Mod:
    return partial(tanh_softcap, soft_cap=3.0)


@SCORES.add("heads")
def softcap_then_alibi(shape: Shape, device: torch.device) -> Mod:
    slopes = [0.5**h for h in range(shape.Hq)]
    slope_table = torch.tensor(slopes, device=device)

    def mod(score, b, h, q_idx, kv_idx):
        capped = tanh_softcap(score, b, h, q_idx, kv_idx, 5.0)
        return capped - slope_table[h] * (q_idx - kv_idx).abs()

    return mod


@SCORES.add()
def clamped(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q, k: torch.clamp(score, min=-1.0, max=0.75).clamp_min(-0.9)


@SCORES.add()
def sigmoid_gate(shape: Shape, device: torch.device) -> Mod:
    gate = random_values(shape.Lk, seed=13, device=device)

    def mod(score, b, h, q_idx, kv_idx):
        return score * torch.sigmoid(gate[kv_idx] + score)

    return mod


@SCORES.add()
def polynomial(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q, k: 0.1 * score**3 - score.square() / 4 + score.abs().sqrt() + 2**-1.5


@SCORES.add()
def smooth_functions(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        gelu = score * 0.5 * (1.0 + torch.erf(score * math.sqrt(0.5)))
        return gelu + torch.rsqrt(1.0 + score * score) - torch.exp(-score.abs()) + torch.exp2(-(score * score))

    return mod


@SCORES.add()
def rounded_indices(shape: Shape, device: torch.device) -> Mod:
    """Rounds what is exact in every dtype, so that a result near a half cannot tip over."""

    def mod(score, b, h, q_idx, kv_idx):
        position = (q_idx - kv_idx) * 0.25
        steps = torch.floor(position) + torch.ceil(position * 0.5) - torch.round(position) + position.trunc()
        return score + 0.1 * steps + torch.sign(q_idx - kv_idx) * 0.2

    return mod


@SCORES.add()
def minimum_and_maximum(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        bounded = torch.maximum(score, -torch.ones_like(score))
        return torch.minimum(bounded, torch.max(score * 0.5, bounded)) + torch.minimum(q_idx, kv_idx) * 0.01

    return mod


@SCORES.add()
def nan_and_infinity_tests(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        ratio = score / (q_idx - kv_idx)
        broken = torch.isinf(ratio) | torch.isnan(ratio) | ~torch.isfinite(ratio)
        return torch.where(broken, score, torch.tanh(ratio))

    return mod


# -inf.


@SCORES.add()
def minus_infinity(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))


@SCORES.add()
def minus_infinity_rows(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        return score.masked_fill(q_idx % 3 == 1, float("-inf"))

    return mod


@SCORES.add()
def lowest_finite(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx <= q_idx, score, torch.finfo(torch.float32).min)

    return mod


# Results that are no float, or no function of the score.


@SCORES.add()
def from_indices_only(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: (kv_idx - q_idx) * 0.125


@SCORES.add()
def returns_bool(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: q_idx >= kv_idx


@SCORES.add()
def returns_int(shape: Shape, device: torch.device) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: kv_idx % 7


@SCORES.add()
def returns_table_entry(shape: Shape, device: torch.device) -> Mod:
    importance = random_values(shape.Lk, seed=14, device=device)
    return lambda score, b, h, q_idx, kv_idx: importance[kv_idx]


# Captured tables of every rank and stride.


@SCORES.add()
def bias_per_key(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(shape.Lk, seed=15, device=device)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    return mod


@SCORES.add("heads")
def bias_per_head(shape: Shape, device: torch.device) -> Mod:
    head_scale = random_values(shape.Hq, seed=16, device=device)
    return lambda score, b, h, q_idx, kv_idx: score * head_scale[h]


@SCORES.add("heads")
def bias_head_query_key(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(shape.Hq, shape.Lq, shape.Lk, seed=17, device=device)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]


@SCORES.add("batches", "heads")
def bias_dense(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(shape.B, shape.Hq, shape.Lq, shape.Lk, seed=18, device=device)
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


@SCORES.add("batches", "heads")
def bias_expanded(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(1, 1, shape.Lq, 1, seed=19, device=device).expand(shape.B, shape.Hq, -1, shape.Lk)
    return lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx]


@SCORES.add()
def bias_transposed(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(shape.Lk, shape.Lq, seed=20, device=device).transpose(0, 1)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx][kv_idx]

    return mod


@SCORES.add()
def bias_strided_view(shape: Shape, device: torch.device) -> Mod:
    storage = random_values(3 * shape.Lk + 5, seed=21, device=device)
    every_third = storage[5::3][: shape.Lk]
    return lambda score, b, h, q_idx, kv_idx: score + every_third[kv_idx]


@SCORES.add()
def bias_bfloat16(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(shape.Lk, seed=22, device=device).to(torch.bfloat16)
    return lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]


@SCORES.add()
def negative_index_wraps(shape: Shape, device: torch.device) -> Mod:
    bias = random_values(shape.longest, seed=23, device=device)
    length = shape.longest

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx - length] - bias[-1]

    return mod


@SCORES.add("heads")
def two_tables(shape: Shape, device: torch.device) -> Mod:
    row_bias = random_values(shape.Lq, shape.Hq, seed=24, device=device)
    column_bias = random_values(shape.Lk, seed=25, device=device).half()

    def mod(score, b, h, q_idx, kv_idx):
        return score + row_bias[q_idx, h] * column_bias[kv_idx] + column_bias[kv_idx]

    return mod


@SCORES.add()
def index_through_table(shape: Shape, device: torch.device) -> Mod:
    group_of = random_ints(0, 5, shape.longest, seed=26, device=device).to(torch.int32)
    affinity = random_values(5, 5, seed=27, device=device)

    def mod(score, b, h, q_idx, kv_idx):
        return score + affinity[group_of[q_idx], group_of[kv_idx]]

    return mod


@SCORES.add()
def temperature_tensor(shape: Shape, device: torch.device) -> Mod:
    temperature = torch.tensor(0.7, device=device)
    return lambda score, b, h, q_idx, kv_idx: score * temperature + temperature


@SCORES.add()
def dot_of_rows(shape: Shape, device: torch.device) -> Mod:
    query_rows = random_values(shape.Lq, 4, seed=28, device=device)
    key_rows = random_values(shape.Lk, 4, seed=29, device=device)

    def mod(score, b, h, q_idx, kv_idx):
        return score + (query_rows[q_idx] * key_rows[kv_idx]).sum(-1)

    return mod


class LearnedBias(torch.nn.Module):
    """A score mod as a module: its parameter is an attribute."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(values, requires_grad=False)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.bias[h, kv_idx]


@SCORES.add("heads")
def bias_of_module(shape: Shape, device: torch.device) -> Mod:
    return LearnedBias(random_values(shape.Hq, shape.Lk, seed=30, device=device)).forward


# Integers.


@SCORES.add()
def floor_division_of_negatives(shape: Shape, device: torch.device) -> Mod:
    period, shift = 5, 3

    def mod(score, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return score + (distance // period) * 0.125 + (distance - shift) % period * 0.25 + (kv_idx - 9) // -4

    return mod


@SCORES.add()
def bit_operations(shape: Shape, device: torch.device) -> Mod:
    def mod(score, b, h, q_idx, kv_idx):
        mixed = (q_idx ^ (kv_idx << 1)) & 7 | (h >> 1)
        parity = torch.bitwise_and(q_idx + kv_idx, 1)
        return score + mixed * 0.125 - torch.where(parity.bool(), 0.5, 0.0) + (~kv_idx) * 0.01

    return mod


@SCORES.add("heads")
def scale_by_head_list(shape: Shape, device: torch.device) -> Mod:
    scales = [1.0 + 0.25 * head for head in range(shape.Hq)]

    def mod(score, b, h, q_idx, kv_idx):
        for head, head_scale in enumerate(scales):
            score = torch.where(h == head, score * head_scale, score)
        return score

    return mod
