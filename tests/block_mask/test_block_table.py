"""A BlockMask is read into a block table without waiting for the device, and refused where it does not fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from flexgen.block_mask import create_block_mask
from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.runtime.block_table import BlockTable, check_block_table, read_block_mask

EXTENTS = {"batch": 2, "query_heads": 4, "query_length": 100, "key_length": 200}


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def mask_for(B: int | None = 2, H: int | None = 4, device: str = "cpu") -> BlockMask:
    return create_block_mask(causal, B, H, 100, 200, device, (16, 32))


def read(block_mask: Any, **changed: Any) -> BlockTable:
    return read_block_mask(block_mask, **{**EXTENTS, **changed})


@pytest.mark.parametrize("B", [None, 2])
@pytest.mark.parametrize("H", [None, 4])
def test_lists_are_expanded_to_the_call(B: int | None, H: int | None) -> None:
    block_mask = mask_for(B, H)
    table = read(block_mask, device=torch.device("cpu"))
    check_block_table(table)
    assert (table.q_block_size, table.kv_block_size, table.num_q_blocks, table.num_kv_blocks) == (16, 32, 7, 7)
    assert (table.mask_batch, table.mask_heads) == (B or 1, H or 1)
    assert table.kv_indices.shape == (2, 4, 7, 7)
    assert torch.equal(table.kv_indices[1, 3], block_mask.kv_indices[-1, -1])
    assert table.kv_indices.stride()[:2] == (0 if B is None else table.mask_heads * 49, 0 if H is None else 49)
    assert table.has_full_blocks
    assert torch.equal(table.full_q_num_blocks[0, 0], block_mask.full_q_num_blocks[0, 0])


def test_lists_are_not_copied_when_they_are_ready() -> None:
    block_mask = mask_for()
    assert read(block_mask).kv_indices.data_ptr() == block_mask.kv_indices.data_ptr()


def test_a_mask_without_full_blocks_or_columns() -> None:
    made = mask_for()
    rows_only = BlockMask.from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=(16, 32), seq_lengths=(100, 200), compute_q_blocks=False
    )
    table = read(rows_only)
    assert not table.has_full_blocks
    assert table.q_indices is None
    check_block_table(table)


def test_other_integers_and_strides_are_converted() -> None:
    block_mask = mask_for()
    expected = block_mask.kv_indices.clone()
    block_mask.kv_indices = expected.long().transpose(2, 3).contiguous().transpose(2, 3)
    table = read(block_mask)
    assert table.kv_indices.dtype == torch.int32
    assert table.kv_indices.stride(-1) == 1
    assert torch.equal(table.kv_indices, expected)


def test_unused_entries_rows_and_widths_are_left_alone() -> None:
    block_mask = mask_for()
    used = torch.arange(7) < block_mask.kv_num_blocks[..., None]
    garbage = torch.where(used, block_mask.kv_indices, -(10**6))
    block_mask.kv_indices = torch.nn.functional.pad(garbage, (0, 5, 0, 3), value=10**6)
    block_mask.kv_num_blocks = torch.nn.functional.pad(block_mask.kv_num_blocks, (0, 3), value=99)
    check_block_table(read(block_mask))


def test_trimmed_lists_are_read_and_their_short_columns_dropped() -> None:
    made = mask_for(1, 1)
    trimmed = BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices[..., :4],
        BLOCK_SIZE=(16, 32),
        seq_lengths=(100, 200),
    )
    table = read(trimmed)
    check_block_table(table)
    assert table.kv_indices.shape == (2, 4, 7, 4)
    assert table.q_indices is None


def test_reading_never_looks_at_values() -> None:
    table = read(mask_for(device="meta"))
    assert table.kv_indices.device.type == "meta"


def test_zero_lengths_are_read() -> None:
    for lengths in ((0, 200), (100, 0), (0, 0)):
        block_mask = create_block_mask(causal, 1, 1, *lengths, "cpu", 16)
        check_block_table(read(block_mask, query_length=lengths[0], key_length=lengths[1]))


def test_torchs_own_stand_in_for_no_mask_fits_any_length() -> None:
    query = torch.empty(2, 4, 100, 8)
    table = read(torch_flex._create_empty_block_mask(query, query))
    check_block_table(table)
    assert (table.num_q_blocks, table.num_kv_blocks) == (1, 1)
    assert table.kv_num_blocks[1, 3].tolist() == [1]


@pytest.mark.parametrize("sizes", [(3, 4), (2, 3), (1, 2), (4, 1)])
def test_a_mask_for_another_batch_or_head_count_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedProblemError, match=r"the BlockMask's kv lists have \d (batch|heads), but the query"):
        read(mask_for(*sizes))


@pytest.mark.parametrize("lengths", [(2, 200), (100, 2), (128, 200), (100, 256)])
def test_a_mask_for_other_lengths_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedProblemError, match="was made for 100 queries and 200 keys"):
        read(mask_for(), query_length=lengths[0], key_length=lengths[1])


def test_a_mask_on_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedProblemError, match="lies on meta, but the query on cpu"):
        read(mask_for(device="meta"), device=torch.device("cpu"))


def test_a_sliced_mask_is_refused_until_its_mask_mod_is_set() -> None:
    made = mask_for()
    sliced = made[:, :, 3]
    with pytest.raises(UnsupportedProblemError, match="was sliced and has no mask_mod"):
        read(sliced, query_length=16)
    sliced.mask_mod = lambda b, h, q_idx, kv_idx: causal(b, h, q_idx + 48, kv_idx)
    with pytest.raises(UnsupportedProblemError, match=r"set block_mask\.seq_lengths"):
        read(sliced, query_length=16)
    sliced.seq_lengths = (16, 200)
    table = read(sliced, query_length=16)
    check_block_table(table)
    assert torch.equal(table.kv_num_blocks[..., 0], made.kv_num_blocks[..., 3])


def test_rows_taken_without_new_lengths_are_refused() -> None:
    sliced = mask_for()[:, :, 2:4]
    sliced.mask_mod = causal
    with pytest.raises(UnsupportedProblemError, match="has 2 rows of blocks, but the data needs 7"):
        read(sliced)


def test_a_slice_along_heads_is_read_once_its_mask_mod_is_set() -> None:
    sliced = mask_for()[:, 1:3]
    sliced.mask_mod = causal
    check_block_table(read(sliced, query_heads=2))


def test_lists_that_lost_a_dimension_are_refused() -> None:
    made = mask_for()
    made.kv_num_blocks, made.kv_indices = made.kv_num_blocks[0], made.kv_indices[0]
    with pytest.raises(UnsupportedProblemError, match="keep every dimension"):
        read(made)


def test_what_is_no_block_mask_is_refused() -> None:
    with pytest.raises(ProblemTypeError, match="is a Tensor"):
        read(torch.ones(3))
    made = mask_for()
    made.kv_indices = made.kv_indices.float()
    with pytest.raises(ProblemTypeError, match=r"kv_indices has dtype torch\.float32"):
        read(made)
    fields = {name: getattr(mask_for(), name) for name in ("seq_lengths", "kv_num_blocks", "kv_indices")}
    with pytest.raises(UnsupportedProblemError, match="BLOCK_SIZE is 16"):
        read(SimpleNamespace(**fields, BLOCK_SIZE=16))
    half = SimpleNamespace(**fields, BLOCK_SIZE=(16, 32), full_kv_num_blocks=fields["kv_num_blocks"])
    with pytest.raises(UnsupportedProblemError, match="only one of full_kv_num_blocks"):
        read(half)


class TestCheckBlockTable:
    """A mask of 4 rows and 3 columns of blocks; row 1 lists the columns 2 and 0 as partial, and 1 as full."""

    @staticmethod
    def table(**changed: Any) -> BlockTable:
        def lists(counts: list[int], entries: list[list[int]]) -> tuple[Tensor, Tensor]:
            to_tensor = {"dtype": torch.int32}
            return torch.tensor([[counts]], **to_tensor), torch.tensor([[entries]], **to_tensor)

        kv = lists([0, 2, 0, 0], [[9, 9, 9], [2, 0, 9], [9, 9, 9], [9, 9, 9]])
        full = lists([0, 1, 0, 0], [[9], [1], [9], [9]])
        q = lists([1, 0, 1], [[1], [9], [1]])
        sizes = {"q_block_size": 8, "kv_block_size": 8, "mask_batch": 1, "mask_heads": 1}
        return replace(BlockTable(**sizes, num_q_blocks=4, num_kv_blocks=3, **_named(kv, full, q)), **changed)

    def test_accepts_lists_in_any_order(self) -> None:
        check_block_table(self.table())

    @pytest.mark.parametrize("count", [-1, 4])
    def test_refuses_counts_out_of_range(self, count: int) -> None:
        table = self.table()
        table.kv_num_blocks[0, 0, 2] = count
        with pytest.raises(UnsupportedProblemError, match=r"not in 0\.\.3: batch 0, head 0, row 2"):
            check_block_table(table)

    @pytest.mark.parametrize("index", [-1, 3])
    def test_refuses_indices_out_of_range(self, index: int) -> None:
        table = self.table()
        table.kv_indices[0, 0, 1, 0] = index
        with pytest.raises(UnsupportedProblemError, match=r"not in 0\.\.2: batch 0, head 0, row 1"):
            check_block_table(table)

    def test_refuses_a_block_listed_twice(self) -> None:
        table = self.table()
        table.kv_indices[0, 0, 1, 1] = 2
        with pytest.raises(UnsupportedProblemError, match="lists a block twice: batch 0, head 0, row 1, column 2"):
            check_block_table(table)

    def test_refuses_a_block_that_is_partial_and_full(self) -> None:
        table = self.table()
        table.full_kv_indices[0, 0, 1, 0] = 0
        with pytest.raises(UnsupportedProblemError, match="both as partial and as full: batch 0, head 0, row 1, col"):
            check_block_table(table)

    def test_refuses_columns_that_disagree_with_the_rows(self) -> None:
        table = self.table()
        table.q_indices[0, 0, 2, 0] = 3
        with pytest.raises(UnsupportedProblemError, match="q_indices does not list the blocks that the lists by rows"):
            check_block_table(table)


def _named(kv: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    kinds = {"kv": kv, "full_kv": full, "q": q}
    return {
        f"{kind}_{part}": lists[at]
        for kind, lists in kinds.items()
        for at, part in enumerate(("num_blocks", "indices"))
    }
