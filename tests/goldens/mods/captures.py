"""Captured tensors: ranks, strides, dtypes and indices."""

from __future__ import annotations

import torch

from tests.goldens.mods.case import LENGTH, case


@case()
def scalar_tensor_is_loaded():
    temperature = torch.tensor(0.7)

    def mod(score, b, h, q_idx, kv_idx):
        return score * temperature

    return mod


@case()
def table_of_heads_and_keys():
    bias = torch.zeros(4, LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[h, kv_idx]

    return mod


@case()
def unit_stride_needs_no_stride_argument():
    bias = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    return mod


@case()
def strided_view_reads_its_stride():
    bias = torch.zeros(3 * LENGTH)[::3]

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    return mod


@case()
def transposed_table_has_its_unit_stride_first():
    bias = torch.zeros(LENGTH, LENGTH).t()

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx, kv_idx]

    return mod


@case()
def expanded_dimensions_are_checked_and_not_addressed():
    bias = torch.zeros(1, 1, LENGTH, 1).expand(2, 4, LENGTH, LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[b, h, q_idx, kv_idx]

    return mod


@case()
def bool_table_is_compared_with_zero():
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool)

    def mod(b, h, q_idx, kv_idx):
        return allowed[q_idx, kv_idx]

    return mod


@case()
def half_precision_table_is_computed_in_float32():
    bias = torch.zeros(LENGTH, dtype=torch.float16)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx] * 0.3

    return mod


@case()
def int64_table_keeps_64_bits():
    document_id = torch.zeros(LENGTH, dtype=torch.int64)

    def mod(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    return mod


@case()
def int32_table_stays_in_32_bits():
    lengths = torch.zeros(2, dtype=torch.int32)

    def mod(b, h, q_idx, kv_idx):
        return kv_idx < lengths[b]

    return mod


@case()
def negative_constant_index_counts_from_the_end():
    bias = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[-1]

    return mod


@case()
def index_of_unknown_sign_wraps_and_is_checked():
    bias = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[q_idx - kv_idx]

    return mod


@case()
def index_read_from_a_table_wraps_and_is_checked():
    group = torch.zeros(LENGTH, dtype=torch.int32)
    bias = torch.zeros(8)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[group[kv_idx]]

    return mod


@case()
def index_kept_in_range_by_the_mod_is_not_wrapped():
    bias = torch.zeros(32)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[(q_idx - kv_idx).clamp(0, 31)]

    return mod


@case()
def one_load_serves_two_uses():
    bias = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score * bias[kv_idx] + bias[kv_idx]

    return mod


@case()
def sum_over_a_short_row_is_unrolled():
    query_features, key_features = torch.zeros(LENGTH, 2), torch.zeros(LENGTH, 2)

    def mod(score, b, h, q_idx, kv_idx):
        return score + (query_features[q_idx] * key_features[kv_idx]).sum()

    return mod


@case()
def size_of_a_table_is_a_number():
    bias = torch.zeros(LENGTH)

    def mod(score, b, h, q_idx, kv_idx):
        return score + bias[(q_idx + kv_idx) % len(bias)]

    return mod
