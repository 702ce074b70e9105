"""The masks of the corpus, each written the way its users write it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from tests.corpus.case import Corpus, Mod, Shape, random_ints

MASKS = Corpus()


def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _segment_ids(lengths: Sequence[int], total: int, device: torch.device) -> Tensor:
    """Return int32[total]: the number of the segment each position lies in; the last one fills the rest."""
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    ids += [len(lengths)] * max(total - len(ids), 0)
    return torch.tensor(ids[:total], dtype=torch.int32, device=device)


# Whole and nothing.


@MASKS.add()
def all_true(shape: Shape, device: torch.device) -> Mod:
    return noop_mask


@MASKS.add()
def all_false(shape: Shape, device: torch.device) -> Mod:
    return lambda b, h, q_idx, kv_idx: kv_idx < 0


@MASKS.add()
def rows_empty(shape: Shape, device: torch.device) -> Mod:
    first_live_row = shape.Lq // 3 + 1

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= first_live_row) & (kv_idx <= q_idx)

    return mask


# Causal masks and their offsets.


@MASKS.add()
def causal(shape: Shape, device: torch.device) -> Mod:
    return causal_mask


@MASKS.add()
def causal_bottom_right(shape: Shape, device: torch.device) -> Mod:
    offset = shape.Lk - shape.Lq

    def causal_aligned_at_the_end(b, h, q_idx, kv_idx):
        return q_idx + offset >= kv_idx

    return causal_aligned_at_the_end


@MASKS.add()
def causal_shifted_down(shape: Shape, device: torch.device) -> Mod:
    def mask(b, h, q_idx, kv_idx, offset=-5):
        return kv_idx <= q_idx + offset

    return mask


@MASKS.add()
def causal_tensor_offset(shape: Shape, device: torch.device) -> Mod:
    past = torch.tensor(7, dtype=torch.int32, device=device)
    return lambda b, h, q, k: k <= q + past


@MASKS.add()
def strictly_anti_causal(shape: Shape, device: torch.device) -> Mod:
    return lambda b, h, q_idx, kv_idx: q_idx < kv_idx


# Windows.


@MASKS.add()
def sliding_window(shape: Shape, device: torch.device) -> Mod:
    window = 9

    def sliding_window_mask(b, h, q_idx, kv_idx):
        causal = q_idx >= kv_idx
        in_window = q_idx - kv_idx <= window
        return causal & in_window

    return sliding_window_mask


@MASKS.add()
def sliding_window_combined(shape: Shape, device: torch.device) -> Mod:
    def in_window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 12

    return and_masks(causal_mask, in_window)


@MASKS.add()
def two_sided_window(shape: Shape, device: torch.device) -> Mod:
    radius = 6
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= radius


def _uneven_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
    return (k >= q - left) & (k <= q + right)


@MASKS.add()
def two_sided_uneven(shape: Shape, device: torch.device) -> Mod:
    return partial(_uneven_window, left=11, right=3)


@MASKS.add()
def dilated_window(shape: Shape, device: torch.device) -> Mod:
    window, dilation = 5, 3

    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return torch.logical_and(distance <= window * dilation, distance % dilation == 0)

    return mask


@MASKS.add("heads")
def window_per_head(shape: Shape, device: torch.device) -> Mod:
    windows = torch.tensor([3 + 5 * (h % 4) for h in range(shape.Hq)], dtype=torch.int32, device=device)

    def mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance < windows[h])

    return mask


@MASKS.add("heads")
def dilated_per_head(shape: Shape, device: torch.device) -> Mod:
    def mask(b, h, q_idx, kv_idx):
        dilation = h % 3 + 1
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance % dilation == 0) & (distance // dilation < 4)

    return mask


@MASKS.add()
def global_and_window(shape: Shape, device: torch.device) -> Mod:
    global_tokens, window = 3, 7

    def mask(b, h, q, k):
        is_global = (q < global_tokens) | (k < global_tokens)
        return is_global | ((q - k).abs() <= window)

    return mask


@MASKS.add()
def sink_and_window(shape: Shape, device: torch.device) -> Mod:
    sinks, window = 4, 8
    return lambda b, h, q, k: (q >= k) & ((q - k < window) | (k < sinks))


# Prefixes.


@MASKS.add()
def prefix_lm(shape: Shape, device: torch.device) -> Mod:
    prefix_length = 10

    def prefix_mask(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length

    return or_masks(prefix_mask, causal_mask)


@MASKS.add("batches")
def prefix_lm_per_batch(shape: Shape, device: torch.device) -> Mod:
    prefix_length = torch.tensor([(7 * b + 3) % (shape.Lk + 1) for b in range(shape.B)], device=device)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < prefix_length[b]) | (q_idx >= kv_idx)

    return mask


@MASKS.add()
def prefix_per_token(shape: Shape, device: torch.device) -> Mod:
    visible_until = random_ints(0, shape.Lk + 1, shape.Lq, seed=1, device=device).to(torch.int32)
    return lambda b, h, q_idx, kv_idx: kv_idx < visible_until[q_idx]


# Documents.


@MASKS.add()
def documents_by_equality(shape: Shape, device: torch.device) -> Mod:
    document_id = _segment_ids((5, 11, 2, 17), shape.longest, device)

    def document_mask(b, h, q_idx, kv_idx):
        same_doc = document_id[q_idx] == document_id[kv_idx]
        return same_doc

    return document_mask


@MASKS.add()
def documents_causal(shape: Shape, device: torch.device) -> Mod:
    document_id = _segment_ids((9, 3, 20), shape.longest, device)

    def document_mask(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    return and_masks(document_mask, causal_mask)


@MASKS.add()
def documents_by_offsets(shape: Shape, device: torch.device) -> Mod:
    document_of = _segment_ids((8, 13, 6), shape.Lq, device)
    offsets = torch.tensor([0, 8, 21, 27, shape.Lk], dtype=torch.int32, device=device).clamp(max=shape.Lk)

    def mask(b, h, q_idx, kv_idx):
        document = document_of[q_idx]
        return (offsets[document] <= kv_idx) & (kv_idx < offsets[document + 1])

    return mask


@MASKS.add()
def documents_by_range(shape: Shape, device: torch.device) -> Mod:
    starts = torch.tensor([max(0, q - q % 9) for q in range(shape.Lq)], device=device)
    ranges = torch.stack([starts, starts + 9], dim=-1)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx >= ranges[q_idx, 0]) & (kv_idx < ranges[q_idx, 1])

    return mask


@MASKS.add("batches")
def documents_per_batch_packed(shape: Shape, device: torch.device) -> Mod:
    rows = [_segment_ids((4 + 3 * b, 10, 1 + b), shape.longest, device) for b in range(shape.B)]
    packing = torch.stack(rows).to(torch.int64)

    def mask(b, h, q_idx, kv_idx):
        return packing[b, q_idx].eq(packing[b, kv_idx]).logical_and(q_idx.ge(kv_idx))

    return mask


class DocumentWindow:
    """A mask as an object: users keep their tensors as attributes."""

    def __init__(self, document_id: Tensor, window: int) -> None:
        self.document_id = document_id
        self.window = window

    def same_document(self, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.document_id[q_idx] == self.document_id[kv_idx]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.same_document(q_idx, kv_idx) & (torch.abs(q_idx - kv_idx) < self.window)


@MASKS.add()
def documents_as_object(shape: Shape, device: torch.device) -> Mod:
    return DocumentWindow(_segment_ids((14, 6), shape.longest, device), window=8)


@MASKS.add()
def shared_prefix(shape: Shape, device: torch.device) -> Mod:
    prefix, suffix = 6, 10

    def mask(b, h, q, k):
        same_suffix = (q - prefix) // suffix == (k - prefix) // suffix
        return (k <= q) & ((k < prefix) | same_suffix)

    return mask


# Blocks.


@MASKS.add()
def block_causal(shape: Shape, device: torch.device) -> Mod:
    block = 8
    return lambda b, h, q_idx, kv_idx: q_idx // block >= kv_idx // block


@MASKS.add()
def chunked(shape: Shape, device: torch.device) -> Mod:
    chunk_size = 12

    def mask(b, h, q_idx, kv_idx):
        return (q_idx // chunk_size == kv_idx // chunk_size) & (q_idx >= kv_idx)

    return mask


@MASKS.add("square")
def block_diffusion(shape: Shape, device: torch.device) -> Mod:
    """The noised copy stands before the clean one; both are cut in blocks (training of block diffusion models)."""
    length, block = shape.Lq // 2, 4

    def mask(b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= length, kv_idx >= length
        q_block = torch.where(q_clean, q_idx - length, q_idx) // block
        kv_block = torch.where(kv_clean, kv_idx - length, kv_idx) // block
        within_block = (q_block == kv_block) & (q_clean == kv_clean)
        noised_sees_clean = (q_block > kv_block) & kv_clean & ~q_clean
        clean_sees_clean = (q_block >= kv_block) & kv_clean & q_clean
        return within_block | noised_sees_clean | clean_sees_clean

    return mask


@MASKS.add()
def random_blocks(shape: Shape, device: torch.device) -> Mod:
    side, count = 8, shape.longest // 8 + 1
    live = random_ints(0, 3, count, count, seed=2, device=device) == 0
    return lambda b, h, q, k: live[q // side, k // side] | (q == k)


# Strides and neighbourhoods.


@MASKS.add()
def strided(shape: Shape, device: torch.device) -> Mod:
    stride = 4

    def mask(b, h, q_idx, kv_idx):
        local = (q_idx - kv_idx) < stride
        summary = (kv_idx % stride) == stride - 1
        return (q_idx >= kv_idx) & (local | summary)

    return mask


@MASKS.add()
def remainder_of_negatives(shape: Shape, device: torch.device) -> Mod:
    return lambda b, h, q, k: (q - k) % 5 < 2


@MASKS.add()
def neighbourhood_2d(shape: Shape, device: torch.device) -> Mod:
    canvas_width, radius = 7, 2

    def get_x_y(index):
        return index // canvas_width, index % canvas_width

    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = get_x_y(q_idx)
        kv_x, kv_y = get_x_y(kv_idx)
        return ((q_x - kv_x).abs() <= radius) & ((q_y - kv_y).abs() <= radius)

    return mask


@MASKS.add()
def neighbourhood_3d(shape: Shape, device: torch.device) -> Mod:
    height, width = 3, 5
    radii = (1, 1, 2)

    def coordinates(index):
        return index // (height * width), index // width % height, index % width

    def mask(b, h, q_idx, kv_idx):
        near = torch.ones_like(q_idx, dtype=torch.bool)
        for q, k, radius in zip(coordinates(q_idx), coordinates(kv_idx), radii, strict=True):
            near = near & (torch.abs(q - k) <= radius)
        return near

    return mask


@MASKS.add()
def sliding_tile(shape: Shape, device: torch.device) -> Mod:
    """Sliding tile attention: tiles of a canvas see the tiles around their own, clamped to the canvas."""
    tile, tiles_wide, tiles_high, reach = 4, 4, 4, 1

    def tile_of(index):
        return (index // tile) // tiles_wide, (index // tile) % tiles_wide

    def mask(b, h, q_idx, kv_idx):
        q_row, q_column = tile_of(q_idx)
        kv_row, kv_column = tile_of(kv_idx)
        center_row = torch.clamp(q_row, reach, tiles_high - 1 - reach)
        center_column = q_column.clamp(min=reach, max=tiles_wide - 1 - reach)
        return ((center_row - kv_row).abs() <= reach) & ((center_column - kv_column).abs() <= reach)

    return mask


# Lengths and padding.


@MASKS.add("batches")
def padding_by_lengths(shape: Shape, device: torch.device) -> Mod:
    lengths = torch.tensor([max(1, shape.Lk - 6 * b) for b in range(shape.B)], dtype=torch.int32, device=device)
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


@MASKS.add("batches")
def cross_attention_padding(shape: Shape, device: torch.device) -> Mod:
    q_lengths = torch.tensor([max(0, shape.Lq - 9 * b) for b in range(shape.B)], device=device)
    kv_lengths = torch.tensor([max(0, shape.Lk - 4 * b - 1) for b in range(shape.B)], device=device)

    def mask(b, h, q_idx, kv_idx):
        return (q_idx < q_lengths[b]) & (kv_idx < kv_lengths[b])

    return mask


@MASKS.add("batches")
def decode_offset_per_batch(shape: Shape, device: torch.device) -> Mod:
    cached = torch.tensor([(5 * b + 2) % shape.Lk for b in range(shape.B)], dtype=torch.int32, device=device)
    return lambda b, h, q, k: k <= q + cached[b]


# Tables.


@MASKS.add("batches", "heads")
def dense_table(shape: Shape, device: torch.device) -> Mod:
    allowed = random_ints(0, 2, shape.B, shape.Hq, shape.Lq, shape.Lk, seed=3, device=device) == 1
    return lambda b, h, q_idx, kv_idx: allowed[b, h, q_idx, kv_idx]


@MASKS.add()
def dense_table_transposed(shape: Shape, device: torch.device) -> Mod:
    columns = random_ints(0, 3, shape.Lk, shape.Lq, seed=4, device=device) > 0
    allowed = columns.t()

    def mask(b, h, q_idx, kv_idx):
        return allowed[q_idx][kv_idx]

    return mask


@MASKS.add("heads")
def table_of_pairs_per_head(shape: Shape, device: torch.device) -> Mod:
    blocks = random_ints(0, 4, shape.Hq, -(-shape.Lq // 16), -(-shape.Lk // 8), seed=5, device=device) == 0
    allowed = blocks.repeat_interleave(16, 1).repeat_interleave(8, 2)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & allowed[h, q_idx, kv_idx]


@MASKS.add("heads")
def live_heads(shape: Shape, device: torch.device) -> Mod:
    head_live = torch.tensor([h % 2 == 1 for h in range(shape.Hq)], device=device)
    return lambda b, h, q_idx, kv_idx: head_live[h] & (q_idx >= kv_idx)


@MASKS.add()
def tree_bits(shape: Shape, device: torch.device) -> Mod:
    """Speculative decoding: bit k of a row says whether token k (modulo 32) is an ancestor."""
    ancestors = random_ints(0, 2**32, shape.Lq, seed=5, device=device)

    def mask(b, h, q_idx, kv_idx):
        return ((ancestors[q_idx] >> (kv_idx & 31)) & 1) == 1

    return mask


# Combinations.


@MASKS.add()
def negated(shape: Shape, device: torch.device) -> Mod:
    def mask(b, h, q, k):
        return ~((k > q) | ((q - k) > 10)) | (k == 0)

    return mask


@MASKS.add()
def exclusive_or(shape: Shape, device: torch.device) -> Mod:
    return lambda b, h, q, k: (q >= k) ^ (k % 3 == 0)


@MASKS.add("heads")
def causal_or_window_by_head(shape: Shape, device: torch.device) -> Mod:
    def window(b, h, q, k):
        return (q - k).abs() <= 4

    def even_heads(b, h, q, k):
        return h % 2 == 0

    def odd_heads(b, h, q, k):
        return torch.logical_not(even_heads(b, h, q, k))

    return or_masks(and_masks(even_heads, causal_mask), and_masks(odd_heads, window))


@MASKS.add()
def constant_branches(shape: Shape, device: torch.device) -> Mod:
    bidirectional, window = False, None

    def mask(b, h, q_idx, kv_idx):
        live = kv_idx >= 0 if bidirectional else q_idx >= kv_idx
        if window is not None:
            live = live & (q_idx - kv_idx < window)
        return live

    return mask
