"""Attention over derived block tables agrees with float64, and makes a table only when one is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexgen
from flexgen.lowering.schedule import Walk
from flexgen.runtime.derived_table import DerivedTable
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS
from tests.forward.run import Inputs, check_forward, random_inputs, refusal

SMALL = {"BLOCK_M": 16, "BLOCK_N": 16}
SHAPE = Shape(2, 4, 2, 53, 53)
TABLED = (
    "documents_by_equality",
    "documents_causal",
    "documents_per_batch_packed",
    "random_blocks",
    "strided",
    "remainder_of_negatives",
    "exclusive_or",
)
NARROW = ("dilated_window", "dilated_per_head", "documents_as_object", "neighbourhood_2d", "neighbourhood_3d")


def documents(document_id: Tensor) -> Callable[..., Tensor]:
    def document_mask(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    return document_mask


def packed(length: int, device: torch.device, parts: int = 4) -> Tensor:
    return (torch.arange(length, device=device) * parts // max(length, 1)).to(torch.int32)


def small(mask: Callable[..., Tensor]) -> flexgen.Attention:
    return flexgen.compile(None, mask, SMALL)


def table_of(attention: flexgen.Attention, inputs: Inputs, **options: int) -> DerivedTable:
    table = attention.block_table(inputs.query, inputs.key, **options)
    assert table is not None
    return table


def tables_built(attention: flexgen.Attention) -> int:
    return attention._tables.cache.built


def inputs_of(length: int, device: torch.device, kv_length: int | None = None) -> Inputs:
    return random_inputs(Shape(1, 2, 1, length, length if kv_length is None else kv_length), device)


@pytest.mark.parametrize("name", TABLED)
def test_masks_that_are_no_intervals_walk_a_derived_table(name: str, device: torch.device) -> None:
    mask, inputs = MASKS[name].build(SHAPE, device), random_inputs(SHAPE, device)
    attention = small(mask)
    implicit = check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 1
    assert attention.lower(*inputs, target="interpret").plan.schedule.walk is Walk.DERIVED
    assert attention(*inputs, block_table=table_of(attention, inputs), validate=True).equal(implicit)
    assert tables_built(attention) == 1


@pytest.mark.parametrize("name", NARROW)
def test_narrow_hulls_are_visited_without_a_table_but_may_have_one(name: str, device: torch.device) -> None:
    mask, inputs = MASKS[name].build(SHAPE, device), random_inputs(SHAPE, device)
    attention = small(mask)
    implicit = check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 0
    assert "visited directly" in attention.lower(*inputs, target="interpret").explain()
    explicit = attention(*inputs, block_table=table_of(attention, inputs), validate=True)
    torch.testing.assert_close(explicit, implicit)


def test_masks_that_are_intervals_need_no_table(device: torch.device) -> None:
    attention, inputs = small(MASKS["causal"].build(SHAPE, device)), random_inputs(SHAPE, device)
    assert attention.block_table(inputs.query, inputs.key) is None
    attention(*inputs, block_table=None)
    assert tables_built(attention) == 0


def test_a_table_of_pairs_is_visited_in_full_and_explain_says_why(device: torch.device) -> None:
    attention, inputs = small(MASKS["dense_table_transposed"].build(SHAPE, device)), random_inputs(SHAPE, device)
    attention(*inputs)
    assert tables_built(attention) == 0
    assert "allowed is read at a query and a key" in attention.lower(*inputs, target="interpret").explain()


def test_a_table_of_pairs_is_evaluated_where_a_block_table_is_asked_for(device: torch.device) -> None:
    live = torch.zeros(2, 96, 96, dtype=torch.bool, device=device)
    live[0, :40, :40] = live[1, 50:, 30:70] = True  # 3 * 3 blocks of head 0, 3 * 4 of head 1; the rest is empty
    mask = lambda b, h, q_idx, kv_idx: live[h, q_idx, kv_idx]  # noqa: E731
    attention, inputs = small(mask), random_inputs(Shape(1, 2, 2, 96, 96), device)
    table = table_of(attention, inputs)
    assert table.lists["kv_num_blocks"].sum() == 3 * 3 + 3 * 4
    out = check_forward(inputs, None, mask, attention=attention)
    torch.testing.assert_close(attention(*inputs, block_table=table, validate=True), out)
    for tensor in inputs:
        tensor.requires_grad_()
    given, own = (attention(*inputs, block_table=each).square().sum() for each in (table, None))
    for mine, expected in zip(torch.autograd.grad(given, inputs), torch.autograd.grad(own, inputs), strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("lengths", [(17, 1), (31, 37), (40, 97), (97, 40), (64, 64), (131, 67)])
def test_lengths_need_not_be_equal_nor_whole_blocks(lengths: tuple[int, int], device: torch.device) -> None:
    mask = documents(packed(max(lengths), device))
    attention = small(mask)
    inputs = inputs_of(lengths[0], device, lengths[1])
    out = check_forward(inputs, None, mask, attention=attention)
    table = table_of(attention, inputs)
    torch.testing.assert_close(attention(*inputs, block_table=table, validate=True), out)


@pytest.mark.parametrize("lengths", [(0, 40), (40, 0), (0, 0), (1, 40), (16, 40)])
def test_empty_and_short_calls_take_a_table_too(lengths: tuple[int, int], device: torch.device) -> None:
    attention = small(documents(packed(64, device)))
    inputs = inputs_of(lengths[0], device, lengths[1])
    table = table_of(attention, inputs)
    torch.testing.assert_close(attention(*inputs, block_table=table, validate=True), attention(*inputs))


def test_grouped_heads_with_few_queries_walk_an_explicit_table(device: torch.device) -> None:
    shape = Shape(2, 6, 2, 9, 70)
    mask, inputs = documents(packed(70, device)), random_inputs(shape, device)
    attention = small(mask)
    out = check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 0
    torch.testing.assert_close(attention(*inputs, block_table=table_of(attention, inputs)), out)


# Reuse.


def test_an_implicit_table_is_made_once_and_shared_between_tensors(device: torch.device) -> None:
    attention = small(documents(packed(60, device)))
    for seed in range(3):
        attention(*random_inputs(Shape(1, 2, 1, 60, 60), device, seed=seed))
    assert tables_built(attention) == 1


def test_a_tensor_changed_in_place_gets_a_new_table(device: torch.device) -> None:
    document_id = packed(60, device)
    mask, inputs = documents(document_id), inputs_of(60, device)
    attention = small(mask)
    check_forward(inputs, None, mask, attention=attention)
    document_id.copy_(packed(60, device, parts=7).flip(0))
    check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 2


class Documents:
    """A mask whose tensor is replaced between calls."""

    def __init__(self, document_id: Tensor) -> None:
        self.document_id = document_id

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.document_id[q_idx] == self.document_id[kv_idx]


def test_a_replaced_tensor_gets_a_new_table_also_at_the_same_address(device: torch.device) -> None:
    mask, inputs = Documents(packed(60, device)), inputs_of(60, device)
    attention = small(mask)
    for parts in (2, 3, 5):
        mask.document_id = None  # type: ignore[assignment]  # so that its memory is free for the next one
        mask.document_id = packed(60, device, parts)
        check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 3


def test_two_masks_in_turn_keep_a_table_each(device: torch.device) -> None:
    mask, inputs = Documents(packed(60, device)), inputs_of(60, device)
    attention = small(mask)
    first, second = packed(60, device, 3), packed(60, device, 5)
    for document_id in (first, second, first, second):
        mask.document_id = document_id
        check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 2


def test_tensors_of_inference_mode_are_never_taken_to_be_unchanged(device: torch.device) -> None:
    with torch.inference_mode():
        document_id = packed(60, device)
        mask, inputs = documents(document_id), inputs_of(60, device)
        attention = small(mask)
        attention(*inputs)
        document_id.copy_(packed(60, device, parts=7))
        check_forward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 2


def test_a_changing_number_gets_a_new_table(device: torch.device) -> None:
    def stripes(b, h, q_idx, kv_idx, period=16):
        return (q_idx // period) % 3 == (kv_idx // period) % 3

    inputs = inputs_of(96, device)
    attention = small(stripes)
    for period in (16, 32, 24, 16):
        stripes.__defaults__ = (period,)
        check_forward(inputs, None, stripes, attention=attention)
    assert tables_built(attention) >= 3


# Room.


def test_a_table_without_room_is_right_and_says_so_when_asked(device: torch.device) -> None:
    mask, inputs = documents(packed(100, device)), inputs_of(100, device)
    attention = small(mask)
    table = table_of(attention, inputs, max_blocks=5)
    assert int(table.needed) > 5
    out = attention(*inputs, block_table=table)
    torch.testing.assert_close(out, attention(*inputs))
    refusal(table.check, flexgen.UnsupportedProblemError, f"max_blocks={int(table.needed)}", "max_blocks=5")
    refusal(
        lambda: attention(*inputs, block_table=table, validate=True), flexgen.UnsupportedProblemError, "max_blocks=5"
    )


@pytest.mark.parametrize("room", [0, 1, 13, 1000])
def test_any_room_gives_the_same_result(room: int, device: torch.device) -> None:
    attention, inputs = small(documents(packed(100, device))), inputs_of(100, device)
    table = table_of(attention, inputs, max_blocks=room)
    torch.testing.assert_close(attention(*inputs, block_table=table), attention(*inputs))


def test_max_blocks_must_be_a_count(device: torch.device) -> None:
    attention, inputs = small(documents(packed(60, device))), inputs_of(60, device)
    for wrong in (-1, 2.5, True):
        refusal(
            lambda wrong=wrong: attention.block_table(inputs.query, inputs.key, max_blocks=wrong),
            flexgen.ProblemTypeError,
            "max_blocks",
        )


def test_lists_grow_with_visited_blocks_only(device: torch.device) -> None:
    inputs = inputs_of(640, device)
    table = table_of(small(documents(packed(640, device, parts=40))), inputs)
    assert table.capacity == 40
    assert table.nbytes < 8 * (40 + 40 + 3 * 40)


# Explicit tables of the wrong kind.


def test_a_table_of_changed_values_is_refused(device: torch.device) -> None:
    document_id = packed(60, device)
    attention, inputs = small(documents(document_id)), inputs_of(60, device)
    table = table_of(attention, inputs)
    attention(*inputs, block_table=table)
    document_id.add_(1)
    refusal(
        lambda: attention(*inputs, block_table=table), flexgen.UnsupportedProblemError, "other values", "block_table("
    )


def test_a_table_of_another_mask_or_other_extents_is_refused(device: torch.device) -> None:
    inputs = inputs_of(60, device)
    attention, other = small(documents(packed(99, device))), small(documents(packed(99, device)))
    table = table_of(attention, inputs)
    refusal(lambda: other(*inputs, block_table=table), flexgen.UnsupportedProblemError, "another mask")
    longer = inputs_of(70, device)
    refusal(lambda: attention(*longer, block_table=table), flexgen.UnsupportedProblemError, "60 queries", "70")


# Random masks.


def _random_mask(kind: int, number: int, values: Tensor) -> Callable[..., Tensor]:
    def equal(b, h, q, k):
        return values[q] == values[k]

    def ordered(b, h, q, k):
        return (values[q] * 5 + q) // 8 >= (values[k] * 3 + k) // 8

    def striped(b, h, q, k):
        return ((q + h) // number) % 3 == (k // (number + 1)) % 2

    def near(b, h, q, k):
        return ((values[q] - values[k]).abs() <= 1) | (q == k)

    return (equal, ordered, striped, near)[kind]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 40), st.integers(17, 70), st.integers(1, 70), st.booleans())
def test_random_joins_of_masks_agree_with_float64(
    first: int, second: int, number: int, q_len: int, kv_len: int, either: bool
) -> None:
    generator = torch.Generator().manual_seed(number)
    values = torch.randint(0, 5, (80,), generator=generator).sort().values
    parts = _random_mask(first, number, values), _random_mask(second, number + 1, values)
    mask = flexgen.or_masks(*parts) if either else flexgen.and_masks(*parts)
    inputs = inputs_of(q_len, torch.device("cpu"), kv_len)
    out = check_forward(inputs, None, mask, attention=small(mask))
    attention = small(mask)
    table = attention.block_table(inputs.query, inputs.key)
    if table is not None:
        torch.testing.assert_close(attention(*inputs, block_table=table), out)


def test_every_case_named_here_exists() -> None:
    assert all(isinstance(MASKS[name], Case) for name in (*TABLED, *NARROW))
