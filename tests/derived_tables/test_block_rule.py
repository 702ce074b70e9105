"""The rule of a mask never calls a block empty that holds a live pair, nor full one that holds a masked pair."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen.ir.graph import Graph, Node, make
from flexgen.lowering.blocks import block_rule
from tests.analysis.brute_force import Grid
from tests.analysis.expressions import CAUSAL, I64, H, K, Q, index, load, masks, test
from tests.derived_tables.block_grid import Blocks, blocks_of

EXTREME = torch.tensor([2**31 - 1, -(2**31), 0, 5] * 8, dtype=torch.int32)


def tables(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    return {
        "per_head": draw(-3, 9, 2).int(),
        "per_batch": draw(-3, 30, 2),
        "per_query": draw(0, 6, 40).int(),
        "per_key": draw(-9, 30, 40).int(),
        "starts": draw(0, 30, 40).int(),
        "query_flag": draw(0, 2, 40).bool(),
        "key_flag": draw(0, 2, 40).bool(),
    }


def classified(mask: Node, grid: Grid, q_size: int = 4, kv_size: int = 4) -> Blocks:
    blocks = blocks_of(block_rule(Graph("mask", "mask", mask)), mask, grid, q_size, kv_size)
    blocks.check()
    return blocks


@given(masks(), st.sampled_from([(4, 4), (8, 2), (3, 5)]), st.integers(-9, 9), st.integers(0, 3))
def test_random_masks_are_classified_soundly(mask: Node, sizes: tuple[int, int], offset: int, seed: int) -> None:
    grid = Grid(q_len=13, kv_len=17, batches=2, heads=2, buffers=tables(seed), scalars={"offset": offset})
    classified(mask, grid, *sizes)


def test_equal_documents_are_found_exactly() -> None:
    documents = torch.tensor([0] * 9 + [1] * 4 + [2] * 3, dtype=torch.int32)
    same = test("eq", load("documents", Q), load("documents", K))
    blocks = classified(test("and", same, CAUSAL), Grid(16, 16, buffers={"documents": documents}))
    assert blocks.listed.equal(blocks.live)
    assert blocks.full.equal(blocks.whole)


def test_terms_of_one_axis_are_reduced_together() -> None:
    shifted = index("sub", index("sub", Q, index("mod", Q, 4)), index("sub", K, index("mod", K, 4)))
    blocks = classified(test("eq", shifted, 0), Grid(16, 16))
    assert blocks.listed.equal(blocks.live)
    assert blocks.full.equal(blocks.whole)


def test_arithmetic_that_wraps_is_not_trusted() -> None:
    near = make("sub", load_raw("extreme", Q), load_raw("extreme", K), dtype=torch.int32)
    mask = test("lt", make("abs", near, dtype=torch.int32), make("const", attr=5, dtype=torch.int32))
    blocks = classified(mask, Grid(24, 24, buffers={"extreme": EXTREME}), 1, 1)
    assert not blocks.listed.all()


def load_raw(name: str, position: Node, dtype: torch.dtype = torch.int32) -> Node:
    return make("load", position, attr=name, dtype=dtype)


def floats(seed: int, *special: float) -> torch.Tensor:
    values = torch.randn(24, generator=torch.Generator().manual_seed(seed))
    values[: len(special)] = torch.tensor(special)
    return values[torch.randperm(24, generator=torch.Generator().manual_seed(seed))]


@given(
    st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]),
    st.integers(0, 20),
    st.booleans(),
    st.lists(st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -0.0]), max_size=4),
)
def test_floats_compare_soundly_also_with_nan_and_infinities(
    op: str, seed: int, is_distance: bool, special: list[float]
) -> None:
    dtype = torch.float32
    sides = [load_raw("x", Q, dtype), load_raw("y", K, dtype)]
    if is_distance:
        distance = make("abs", make("sub", *sides, dtype=dtype), dtype=dtype)
        sides = [distance, make("const", attr=0.5, dtype=dtype)]
    mask = test("not", test(op, *sides))
    values = {"x": floats(seed, *special), "y": floats(seed + 1, *special)}
    for node in (mask, mask.args[0]):
        classified(node, Grid(24, 24, buffers=values), 3, 4)


def test_a_table_of_blocks_is_read_at_the_corners_of_a_block() -> None:
    live = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) < 0.4
    mask = make("load", index("floordiv", Q, 4), index("floordiv", K, 4), attr="live", dtype=torch.bool)
    grid = Grid(29, 31, buffers={"live": live})
    for sizes in ((4, 4), (8, 4), (4, 8)):
        blocks = classified(mask, grid, *sizes)
        assert blocks.listed.equal(blocks.live)
        assert blocks.full.equal(blocks.whole)


def test_a_table_of_pairs_lists_every_block_and_says_why() -> None:
    mask = make("load", Q, K, attr="allowed", dtype=torch.bool)
    rule = block_rule(Graph("mask", "mask", mask))
    assert rule.tells_nothing
    assert "allowed is read at a query and a key" in rule.unsolved[0].why


def test_bits_are_decided_where_both_sides_are_constant() -> None:
    kinds = torch.tensor([1] * 8 + [2] * 8 + [4] * 8)
    bits = index("and", load("kinds", Q, dtype=I64), load("kinds", K, dtype=I64))
    blocks = classified(test("ne", bits, 0), Grid(24, 24, buffers={"kinds": kinds}))
    assert blocks.listed.equal(blocks.live)


def test_only_axes_that_the_mask_uses_are_named() -> None:
    rule = block_rule(Graph("mask", "mask", test("lt", index("sub", Q, K), load("window", H))))
    assert {axis.value for axis in rule.axes} == {"h"}
