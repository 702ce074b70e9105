"""torch's BlockMask, with the meaning it has in torch's compiled kernels, from torch's maker and from flexgen's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import check_block_mask, check_forward, random_inputs, refusal, square
from tests.reference import assert_near, dense_attention


def causal(b, h, q, k):
    return q >= k


def window_with_sinks(b, h, q, k):
    return (k <= q) & ((q - k <= 31) | (k < 4))


@pytest.mark.parametrize("make", [torch_flex.create_block_mask, flexgen.create_block_mask])
@pytest.mark.parametrize("block_size", [16, 64, (32, 16), (16, 48), 128])
def test_any_block_size_from_either_maker(device, make, block_size):
    inputs = random_inputs(Shape(2, 2, 1, 80, 80), device)
    check_block_mask(inputs, make(causal, 2, None, 80, 80, device=device, BLOCK_SIZE=block_size))


def test_full_and_partial_lists_agree_with_all_partial(device):
    inputs = random_inputs(Shape(1, 4, 1, 256, 256), device)
    make = flexgen.create_block_mask
    split = make(window_with_sinks, 1, 1, 256, 256, device=device, BLOCK_SIZE=64)
    joint = make(window_with_sinks, 1, 1, 256, 256, device=device, BLOCK_SIZE=64, separate_full_blocks=False)
    assert joint.full_kv_num_blocks is None
    by_lists, by_mask = check_block_mask(inputs, split), check_block_mask(inputs, joint)
    direct = check_forward(inputs, mask_mod=window_with_sinks)
    assert_near("full lists", by_lists, by_mask.double(), 2e-6)
    assert_near("no lists", direct, by_mask.double(), 2e-6)


def lists(rows, device, columns):
    """Return (num_blocks, indices) of a block list given as one list of columns a row."""
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32, device=device)
    padded = [[*row, *(column for column in range(columns) if column not in row)] for row in rows]
    return counts, torch.tensor([[padded]], dtype=torch.int32, device=device)


def test_only_listed_blocks_are_visited(device):
    inputs = random_inputs(square(48), device)
    counts, indices = lists([[0], [2, 0], []], device, 3)
    check_block_mask(inputs, BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16))


def test_mask_mod_is_not_applied_on_full_blocks(device):
    inputs = random_inputs(square(48), device)
    partial, full = lists([[0], [1], [2]], device, 3), lists([[2], [0], []], device, 3)
    check_block_mask(inputs, BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=16, mask_mod=causal))


def test_unordered_lists(device):
    inputs = random_inputs(square(64), device)
    partial = lists([[3, 1], [2, 0, 3], [1], [3, 2, 1, 0]], device, 4)
    mask = BlockMask.from_kv_blocks(*partial, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: (q + k) % 3 != 0)
    check_block_mask(inputs, mask)


def test_index_lists_narrower_than_the_number_of_blocks(device):
    """Entries after num_blocks are never read, and the list may be cut to the longest row."""
    inputs = random_inputs(square(64), device)
    counts, indices = lists([[0], [1, 0], [2, 1], [3]], device, 4)
    mask = BlockMask.from_kv_blocks(
        counts, indices[..., :2].contiguous(), BLOCK_SIZE=16, seq_lengths=(64, 64), compute_q_blocks=False
    )
    check_block_mask(inputs, mask)


def test_garbage_after_the_listed_blocks_is_ignored(device):
    inputs = random_inputs(square(48), device)
    counts, indices = lists([[0], [1], [2, 0]], device, 3)
    indices[0, 0, 0, 1:] = 1 << 20
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(48, 48), compute_q_blocks=False)
    check_block_mask(inputs, mask)


def test_score_mod_applies_on_full_and_partial_blocks(device):
    inputs = random_inputs(Shape(1, 2, 2, 64, 64), device)
    block_mask = flexgen.create_block_mask(causal, 1, 1, 64, 64, device=device, BLOCK_SIZE=16)
    check_block_mask(inputs, block_mask, lambda score, b, h, q, k: score + 0.1 * (k - q) * (h + 1))


def test_mask_per_batch_and_head(device):
    inputs = random_inputs(square(48, batch=2, heads=3), device)

    def mask(b, h, q, k):
        return (q >= k) & (q - k < 8 * (b + h + 1))

    for batch, heads in [(2, 3), (2, None), (None, 3), (None, None)]:
        # With a broadcast dimension the lists come from b = 0 or h = 0, and the mask_mod still sees the real one.
        check_block_mask(inputs, flexgen.create_block_mask(mask, batch, heads, 48, 48, device=device, BLOCK_SIZE=16))


@pytest.mark.parametrize(("batch", "heads"), [(3, 1), (1, 4), (3, 4), (4, 2), (2, 3)])
def test_mask_dimensions_that_do_not_fit_are_refused(device, batch, heads):
    inputs = random_inputs(square(8, batch=2, heads=2), device)
    block_mask = flexgen.create_block_mask(causal, batch, heads, 8, 8, device=device)
    call = lambda: flexgen.flex_attention(*inputs, block_mask=block_mask)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, str(batch if batch not in (1, 2) else heads), "2")


def test_mask_heads_are_query_heads_also_with_groups(device):
    inputs = random_inputs(Shape(1, 4, 2, 8, 8), device)
    per_kv_head = flexgen.create_block_mask(causal, 1, 2, 8, 8, device=device)
    call = lambda: flexgen.flex_attention(*inputs, block_mask=per_kv_head, enable_gqa=True)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, "4", "2")


@pytest.mark.parametrize("with_block_mask", [False, True])
def test_head_dependent_mask_of_many_heads_and_few_queries(device, with_block_mask):
    inputs = random_inputs(square(8, heads=32), device, dtype=torch.bfloat16, head_dim=128)
    head_live = torch.arange(32, device=device) > 0

    def mask(b, h, q, k):
        return head_live[h] & (q >= k)

    if with_block_mask:
        out = check_block_mask(inputs, flexgen.create_block_mask(mask, 1, 32, 8, 8, device=device))
    else:
        out = check_forward(inputs, mask_mod=mask)
    assert torch.count_nonzero(out[:, 0]) == 0
    assert torch.count_nonzero(out[:, 1]) > 0


def sliced_rows(block_mask, index):
    """Return a BlockMask of some block rows, lists cut by `index`, for a decode step of one block."""
    rows = block_mask.BLOCK_SIZE[0]

    def shifted(b, h, q, k):
        return causal(b, h, q + 3 * rows, k)

    lists = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return BlockMask.from_kv_blocks(
        *(getattr(block_mask, name)[index] for name in lists),
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=shifted,
        seq_lengths=(rows, block_mask.seq_lengths[1]),
        compute_q_blocks=False,
    )


def decode_problem(device):
    inputs = random_inputs(Shape(4, 4, 4, 32, 128), device)
    block_mask = torch_flex.create_block_mask(causal, 4, 1, 128, 128, device=device, BLOCK_SIZE=32)
    return inputs, block_mask


def test_block_rows_cut_out_of_a_larger_mask(device):
    inputs, block_mask = decode_problem(device)
    sliced = sliced_rows(block_mask, (slice(None), slice(None), slice(3, 4)))
    assert not sliced.kv_indices.is_contiguous()
    check_block_mask(inputs, sliced)


def test_block_row_cut_by_an_int_is_right_or_refused(device):
    """An int drops a dimension; its strides must not be read as if it were there."""
    inputs, block_mask = decode_problem(device)
    sliced = sliced_rows(block_mask, (slice(None), slice(None), 3))
    expected = dense_attention(*inputs, None, lambda b, h, q, k: q + 96 >= k).out
    try:
        out = flexgen.flex_attention(*inputs, block_mask=sliced)
    except flexgen.UnsupportedProblemError:
        return
    assert_near("out", out, expected, 1e-5)


def test_sliced_mask_whose_mask_mod_was_not_set_again_is_refused(device):
    inputs, block_mask = decode_problem(device)
    sliced = block_mask[:, :, 3]
    call = lambda: flexgen.flex_attention(*inputs, block_mask=sliced)  # noqa: E731
    refusal(call, flexgen.FlexgenError, "mask_mod")


def test_block_mask_on_another_device_is_refused():
    inputs = random_inputs(square(16), torch.device("cpu"))
    block_mask = flexgen.create_block_mask(causal, 1, 1, 16, 16, device="cpu")
    moved = block_mask.to("meta")
    call = lambda: flexgen.flex_attention(*inputs, block_mask=moved)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, "meta", "cpu")


def test_drop_in_takes_torch_requests(device):
    inputs = random_inputs(square(20), device)
    out, aux = flexgen.flex_attention(*inputs, return_aux=torch_flex.AuxRequest(lse=True))
    dense = dense_attention(*inputs)
    assert_near("out", out, dense.out, 1e-5)
    assert_near("lse", aux.lse, dense.lse, 1e-5)
    assert aux.max_scores is None
    plain, lse = flexgen.flex_attention(*inputs, return_lse=True)
    assert torch.equal(plain, out)
    assert torch.equal(lse, aux.lse)


def test_attention_takes_the_block_mask_of_its_own_mask_mod(device):
    inputs = random_inputs(square(80, heads=2), device)
    block_mask = flexgen.create_block_mask(window_with_sinks, 1, 1, 80, 80, device=device, BLOCK_SIZE=16)
    out = flexgen.compile(mask_mod=window_with_sinks)(*inputs, block_table=block_mask)
    assert torch.equal(out, flexgen.flex_attention(*inputs, block_mask=block_mask))


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_create_block_mask_lists_the_blocks_torch_lists(block_size):
    def mask(b, h, q, k):
        return ((q - k).abs() < 20 + 10 * b) & (k % 7 != h)

    arguments = (mask, 2, 2, 100, 150)
    ours = flexgen.create_block_mask(*arguments, device="cpu", BLOCK_SIZE=block_size)
    theirs = torch_flex.create_block_mask(*arguments, device="cpu", BLOCK_SIZE=block_size)
    assert isinstance(ours, BlockMask)
    assert (ours.BLOCK_SIZE, ours.seq_lengths) == (theirs.BLOCK_SIZE, theirs.seq_lengths)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for lists_of, counts in [("kv_indices", "kv_num_blocks"), ("full_kv_indices", "full_kv_num_blocks")]:
        listed = torch.arange(getattr(theirs, lists_of).shape[-1]) < getattr(theirs, counts)[..., None]
        mine, other = getattr(ours, lists_of), getattr(theirs, lists_of)
        assert torch.equal(mine[listed], other[listed]), lists_of


def test_mask_makers_mean_what_torch_means():
    even = lambda b, h, q, k: k % 2 == 0  # noqa: E731
    for ours, theirs in [(flexgen.and_masks, torch_flex.and_masks), (flexgen.or_masks, torch_flex.or_masks)]:
        mask = flexgen.create_mask(ours(causal, even), 1, 2, 9, 11, device="cpu")
        assert torch.equal(mask, torch_flex.create_mask(theirs(causal, even), 1, 2, 9, 11, device="cpu"))
    everything = flexgen.create_mask(flexgen.noop_mask, 2, 1, 3, 4, device="cpu")
    assert torch.equal(everything, torch.ones(2, 1, 3, 4, dtype=torch.bool))
