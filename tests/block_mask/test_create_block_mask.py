"""flexgen's create_block_mask gives torch's BlockMask, list for list, without holding the mask."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flexgen.block_mask import and_masks, create_block_mask, create_mask, noop_mask, or_masks
from flexgen.errors import CaptureError, OptionError
from flexgen.runtime.mask_counts import MaskGrid, count_live_entries
from flexgen.runtime.mask_evaluation import CalledMask
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS

CPU = torch.device("cpu")
LISTS = [f"{kind}_{part}" for kind in ("kv", "full_kv", "q", "full_q") for part in ("num_blocks", "indices")]
TORCH_2_13 = hasattr(torch_flex, "_compute_dq_write_order_from_block_mask")
needs_torch_2_13 = pytest.mark.skipif(not TORCH_2_13, reason="this torch's BlockMask has no write order")
BLOCK_SIZES = [128, (64, 96), (5, 7), 1000, [1, 50]]


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def per_batch_and_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() <= 7 * (h + 1) + 3 * b


def assert_same_lists(actual: BlockMask, expected: BlockMask, names: list[str] = LISTS) -> None:
    assert (actual.seq_lengths, actual.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)
    for name in names:
        ours, theirs = getattr(actual, name), getattr(expected, name)
        if theirs is None:
            assert ours is None, name
        else:
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("case", list(MASKS), ids=lambda case: case.name)
def test_corpus_masks_have_torchs_lists(case: Case) -> None:
    shape = Shape(B=2, Hq=3, Hkv=3, Lq=90, Lk=90)
    mask_mod = case.build(shape, CPU)
    sizes = (shape.B, shape.Hq, shape.Lq, shape.Lk)
    actual = create_block_mask(mask_mod, *sizes, CPU, (16, 24))
    assert_same_lists(actual, torch_flex.create_block_mask(mask_mod, *sizes, "cpu", (16, 24)))
    assert actual.mask_mod is mask_mod


@pytest.mark.parametrize("block_size", BLOCK_SIZES, ids=str)
@pytest.mark.parametrize("sizes", [(None, None, 257, 257), (3, 2, 100, 300), (1, 2, 300, 17), (2, None, 1, 130)])
def test_any_block_size_and_lengths_give_torchs_lists(sizes: Any, block_size: Any) -> None:
    actual = create_block_mask(per_batch_and_head, *sizes, "cpu", block_size)
    expected = torch_flex.create_block_mask(per_batch_and_head, *sizes, "cpu", block_size)
    assert_same_lists(actual, expected)
    assert torch.equal(actual.to_dense(), expected.to_dense())


@needs_torch_2_13
def test_full_blocks_can_stay_among_the_partial_ones() -> None:
    arguments: Any = (causal, 1, 1, 300, 300, "cpu", 64)
    actual = create_block_mask(*arguments, separate_full_blocks=False)
    assert actual.full_kv_num_blocks is None
    assert_same_lists(actual, torch_flex.create_block_mask(*arguments, separate_full_blocks=False))


@needs_torch_2_13
@pytest.mark.parametrize("order", [True, False])
def test_write_order_is_torchs(order: bool) -> None:
    arguments: Any = (per_batch_and_head, 2, 2, 200, 300, "cpu", 32)
    keywords = {"compute_dq_write_order": True, "dq_kv_order": order}
    actual = create_block_mask(*arguments, **keywords)
    expected = torch_flex.create_block_mask(*arguments, **keywords)
    assert_same_lists(actual, expected, [*LISTS, "dq_write_order", "dq_write_order_full", "dq_kv_order"])
    assert actual.dq_kv_order_spt is expected.dq_kv_order_spt is order


def test_keywords_this_torch_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False):
        return "compiled"

    monkeypatch.setattr(torch_flex, "create_block_mask", of_torch_2_11)
    with pytest.raises(OptionError, match=r"compute_dq_write_order=True needs a newer torch"):
        create_block_mask(causal, 1, 1, 64, 64, "cpu", compute_dq_write_order=True)
    with pytest.raises(OptionError, match=r"separate_full_blocks=False needs a newer torch"):
        create_block_mask(causal, 1, 1, 64, 64, "cpu", _compile=True, separate_full_blocks=False)
    assert create_block_mask(causal, 1, 1, 64, 64, "cpu", separate_full_blocks=False).full_kv_indices is None
    assert create_block_mask(causal, 1, 1, 64, 64, "cpu", _compile=True) == "compiled"


def test_compile_hands_everything_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record(mask_mod, B, H, Q_LEN, KV_LEN, device=None, BLOCK_SIZE=128, _compile=False, dq_kv_order=True):
        calls.append((mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, dq_kv_order))

    monkeypatch.setattr(torch_flex, "create_block_mask", record)
    create_block_mask(causal, None, 2, 64, 32, "cpu", (8, 16), True, dq_kv_order=False)
    assert calls == [(causal, 1, 2, 64, 32, CPU, (8, 16), True, False)]


@pytest.mark.parametrize("tile_entries", [1, 7, 64, 1000, 10**9])
def test_counts_do_not_depend_on_the_size_of_the_tiles(tile_entries: int) -> None:
    grid = MaskGrid(batch=2, heads=2, query_length=13, key_length=11, q_block_size=4, kv_block_size=6)
    dense = torch_flex.create_mask(per_batch_and_head, 2, 2, 13, 11, "cpu")
    padded = torch.nn.functional.pad(dense.long(), (0, 1, 0, 3))
    expected = padded.reshape(2, 2, 4, 4, 2, 6).sum((3, 5))
    assert torch.equal(count_live_entries(CalledMask(per_batch_and_head), grid, CPU, tile_entries), expected)


def test_no_tile_exceeds_its_bound_and_each_entry_is_seen_once() -> None:
    seen = torch.zeros(300, 200, dtype=torch.int64)
    grid = MaskGrid(batch=1, heads=1, query_length=300, key_length=200, q_block_size=64, kv_block_size=1 << 30)

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.arange:
                starts.append((args[0], args[1]))
            return func(*args, **(kwargs or {}))

    starts: list[tuple[int, int]] = []
    with Watch():
        count_live_entries(CalledMask(causal), grid, CPU, tile_entries=150)
    for at in range(0, len(starts), 4):
        (q_start, q_stop), (kv_start, kv_stop) = starts[at + 2 : at + 4]
        assert (q_stop - q_start) * (kv_stop - kv_start) <= 150
        seen[q_start:q_stop, kv_start:kv_stop] += 1
    assert torch.all(seen == 1)


def test_a_mask_of_few_queries_and_many_keys_lists_the_live_block() -> None:
    block_mask = create_block_mask(causal, 1, 1, 16, 1 << 16, "cpu")
    assert block_mask.kv_num_blocks.tolist() == [[[1]]]
    assert block_mask.kv_indices[0, 0, 0, 0] == 0
    assert block_mask.full_kv_num_blocks.tolist() == [[[0]]]


def test_a_mask_that_ignores_batch_and_head_is_evaluated_once() -> None:
    calls = 0

    def counted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return q_idx >= kv_idx

    grid = MaskGrid(batch=1 << 10, heads=1 << 10, query_length=64, key_length=64, q_block_size=32, kv_block_size=32)
    counts = count_live_entries(CalledMask(counted), grid, CPU, tile_entries=64 * 64)
    assert counts.shape == (1 << 10, 1 << 10, 2, 2)
    assert counts[5, 7].tolist() == [[528, 0], [1024, 528]]
    assert calls == 2


@pytest.mark.parametrize("sizes", [(1, 1, 0, 40), (1, 1, 40, 0), (1, 1, 0, 0), (0, 2, 40, 40), (2, 0, 40, 40)])
def test_zero_sizes_give_empty_lists_of_torchs_shape(sizes: Any) -> None:
    block_mask = create_block_mask(causal, *sizes, "cpu", 16)
    B, H, Q_LEN, KV_LEN = sizes
    rows, columns = math.ceil(Q_LEN / 16), math.ceil(KV_LEN / 16)
    assert block_mask.kv_indices.shape == (B, H, rows, columns)
    assert block_mask.q_indices.shape == (B, H, columns, rows)
    assert block_mask.kv_num_blocks.sum() == block_mask.full_kv_num_blocks.sum() == 0
    assert create_mask(causal, *sizes, "cpu").shape == sizes


def test_torchs_flex_attention_accepts_the_mask() -> None:
    query, key, value = torch.randn(3, 1, 2, 40, 8)
    ours = create_block_mask(per_batch_and_head, 1, 2, 40, 40, "cpu", 16)
    theirs = torch_flex.create_block_mask(per_batch_and_head, 1, 2, 40, 40, "cpu", 16)
    actual = flex_attention(query, key, value, block_mask=ours)
    torch.testing.assert_close(actual, flex_attention(query, key, value, block_mask=theirs))


def test_partial_and_callable_objects_are_mask_mods() -> None:
    class Window(torch.nn.Module):
        def forward(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx - kv_idx).abs() < 8

    def window(width: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < width

    by_partial = create_block_mask(functools.partial(window, 8), 1, 1, 64, 64, "cpu", 16)
    assert_same_lists(create_block_mask(Window(), 1, 1, 64, 64, "cpu", 16), by_partial)


def test_a_row_of_a_table_can_be_reduced() -> None:
    table = torch.arange(12).reshape(4, 3)

    def row_sum_is_even(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (table[q_idx, ...].sum() + table[kv_idx, :].sum() + table[..., 0][1]) % 2 == 1

    even = (table.sum(1)[:, None] + table.sum(1)[None] + 3) % 2 == 1
    assert torch.equal(create_mask(row_sum_is_even, None, None, 4, 4, "cpu")[0, 0], even)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((causal, -1, 1, 8, 8), "B is -1"),
        ((causal, 1, 1, 8.0, 8), "Q_LEN is 8.0"),
        ((causal, 1, 1, 8, 8, "cpu", 0), "BLOCK_SIZE is 0"),
        ((causal, 1, 1, 8, 8, "cpu", (8, 8, 8)), r"BLOCK_SIZE is \(8, 8, 8\)"),
        ((lambda score, b, h, q, k: score, 1, 1, 8, 8), "got a score_mod"),
        ((lambda q, k: q >= k, 1, 1, 8, 8), "the mod takes"),
        ((None, 1, 1, 8, 8), "None is no mod"),
    ],
)
def test_malformed_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        create_block_mask(*arguments)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(OptionError, match="dq_kv_order is None"):
        create_block_mask(causal, 1, 1, 8, 8, "cpu", dq_kv_order=None)


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q, k: q - k, "a torch.int64 tensor of 0 dimensions, not one bool"),
        (lambda b, h, q, k: torch.arange(3) < q, "a torch.bool tensor of 1 dimensions, not one bool"),
        (lambda b, h, q, k: None, "a NoneType, not one bool"),
        (lambda b, h, q, k: (q >= k) if k > 2 else (q < k), "branches on a traced value"),
        (lambda b, h, q, k: torch.zeros(3, dtype=torch.bool)[q], "raised IndexError"),
    ],
)
def test_bad_mask_mods_are_refused(mask_mod: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        create_block_mask(mask_mod, 1, 1, 8, 8, "cpu")


def test_a_branch_is_located_in_the_users_file() -> None:
    def branching(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) and (kv_idx > 2)

    with pytest.raises(CaptureError) as caught:
        create_block_mask(branching, 1, 1, 8, 8, "cpu")
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert caught.value.where.text.strip() == "return (q_idx >= kv_idx) and (kv_idx > 2)"
    assert "`&`" in str(caught.value)


def test_a_python_bool_stands_for_a_constant_mask() -> None:
    block_mask = create_block_mask(lambda b, h, q, k: True, 1, 1, 64, 64, "cpu", 32)
    assert block_mask.full_kv_num_blocks.tolist() == [[[2, 2]]]


class TestCreateMask:
    def test_mask_mod(self) -> None:
        actual = create_mask(per_batch_and_head, 2, 3, 20, 30, "cpu")
        assert torch.equal(actual, torch_flex.create_mask(per_batch_and_head, 2, 3, 20, 30, "cpu"))

    def test_score_mod_masks_where_it_gives_minus_infinity(self) -> None:
        def only_causal(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where(q_idx >= kv_idx, score * 2, -float("inf"))

        actual = create_mask(only_causal, 2, None, 20, 30, "cpu")
        assert torch.equal(actual, torch_flex.create_mask(only_causal, 2, None, 20, 30, "cpu"))


class TestCombinations:
    @pytest.mark.parametrize("count", [0, 1, 3])
    @pytest.mark.parametrize("name", ["and_masks", "or_masks"])
    def test_mean_what_torchs_mean(self, name: str, count: int) -> None:
        masks = [causal, per_batch_and_head, lambda b, h, q, k: k % 3 == 0][:count]
        ours = {"and_masks": and_masks, "or_masks": or_masks}[name](*masks)
        theirs = getattr(torch_flex, name)(*masks)
        assert torch.equal(create_mask(ours, 2, 2, 20, 30, "cpu"), create_mask(theirs, 2, 2, 20, 30, "cpu"))

    def test_noop_allows_everything(self) -> None:
        assert create_mask(noop_mask, 1, 2, 5, 6, "cpu").all()

    @pytest.mark.parametrize("combine", [and_masks, or_masks])
    def test_refuse_what_is_no_mask(self, combine: Any) -> None:
        with pytest.raises(OptionError, match="3 is no mask_mod"):
            combine(causal, 3)
