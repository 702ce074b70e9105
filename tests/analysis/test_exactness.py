"""Masks that are unions of intervals visit exactly the tiles that hold a live entry, in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from flexgen.ir.graph import Axis, Graph, Node
from flexgen.lowering.facts import MaskFacts, Tier, analyse_mask
from tests.analysis.brute_force import Grid, check_mask, visits
from tests.analysis.expressions import CAUSAL, DISTANCE, B, H, K, Q, index, load, scalar, test

BATCHES, HEADS, Q_LEN, KV_LEN = 2, 4, 21, 26


def causal_from(offset: Node) -> Node:
    return test("le", K, index("add", Q, offset))


def window(size: Node | int) -> Node:
    return test("and", CAUSAL, test("lt", DISTANCE, size))


def near(size: Node | int) -> Node:
    return test("le", index("abs", DISTANCE), size)


def block(node: Node, size: int = 5) -> Node:
    return index("floordiv", node, size)


GLOBAL = test("or", test("lt", Q, 3), test("lt", K, 3))
PER_BATCH = load("per_batch", B)
DOCUMENT = load("document", Q)
SINKS_AND_WINDOW = test("and", CAUSAL, test("or", test("lt", K, 3), test("lt", DISTANCE, 6)))
BY_OFFSETS = test(
    "and",
    test("ge", K, load("offsets", DOCUMENT)),
    test("lt", K, load("offsets", index("add", DOCUMENT, 1))),
)


@dataclass(frozen=True)
class Case:
    """A mask with the tier of its keys, and the directions in which its visits are exact."""

    mask: Node
    tier: Tier = Tier.CLOSED_FORM
    exact: tuple[Axis, ...] = (Axis.KV, Axis.Q)
    scalars: dict[str, int] = field(default_factory=dict)


CASES = {
    "causal": Case(CAUSAL),
    "causal from the lower right corner": Case(causal_from(scalar("offset")), scalars={"offset": KV_LEN - Q_LEN}),
    "causal with a negative offset": Case(causal_from(scalar("offset")), scalars={"offset": -7}),
    "causal with a huge offset": Case(causal_from(scalar("offset")), scalars={"offset": 2**47}),
    "causal with an offset per batch": Case(causal_from(PER_BATCH)),
    "sliding window": Case(window(6)),
    "run-time window": Case(window(scalar("window")), scalars={"window": 6}),
    # Each row is empty, but their ends differ: the hull of a tile's rows is not.
    "empty run-time window": Case(window(scalar("window")), exact=(), scalars={"window": 0}),
    "negative run-time window": Case(window(scalar("window")), scalars={"window": -(2**40)}),
    "huge run-time window": Case(window(scalar("window")), scalars={"window": 2**48}),
    "two-sided window": Case(near(4)),
    "prefix": Case(test("or", CAUSAL, test("lt", K, scalar("prefix"))), scalars={"prefix": 9}),
    "prefix per batch": Case(test("or", CAUSAL, test("lt", K, PER_BATCH))),
    "prefix per query": Case(test("lt", K, load("per_query", Q)), Tier.ROW_REDUCED, (Axis.KV,)),
    "sinks and window": Case(SINKS_AND_WINDOW),
    "block causal": Case(test("ge", block(Q), block(K))),
    "chunks": Case(test("and", CAUSAL, test("eq", block(Q), block(K)))),
    "blocks of unequal sizes": Case(test("gt", block(Q, 3), block(K, 4))),
    "global and local": Case(test("or", GLOBAL, near(4))),
    "window per head": Case(window(load("per_head", H)), Tier.ROW_REDUCED),
    "documents by offsets": Case(BY_OFFSETS, Tier.ROW_REDUCED, (Axis.KV,)),
    "padding": Case(test("lt", K, PER_BATCH)),
    "padding of queries": Case(test("and", test("lt", Q, PER_BATCH), test("lt", K, PER_BATCH))),
    "padding with inclusive int64 ends": Case(test("le", K, load("last", B, dtype=torch.int64))),
    "negation": Case(test("not", test("or", test("gt", K, Q), test("gt", DISTANCE, 10)))),
    "diagonal": Case(test("eq", K, Q)),
    "all but the diagonal": Case(test("ne", K, Q)),
    "live heads": Case(test("and", load("live_head", H, dtype=torch.bool), CAUSAL), Tier.ROW_REDUCED),
    "strided diagonal": Case(test("eq", index("mul", K, 2), Q), exact=(Axis.Q,)),
    "scaled causal": Case(test("le", index("mul", K, 3), index("mul", Q, 2))),
    "half of the head": Case(test("or", test("lt", H, 2), near(2))),
}


@pytest.fixture
def grid() -> Grid:
    lengths = [7, 8, 6]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    buffers = {
        "per_batch": torch.tensor([17, 4]),
        "per_query": torch.arange(Q_LEN) % 5 * 4,
        "per_head": torch.tensor([1, 5, 9, 40]),
        "document": document,
        "offsets": torch.tensor([0, 7, 15, 21]),
        "last": torch.tensor([2**63 - 1, 3]),
        "live_head": torch.tensor([True, False, True, False]),
    }
    return Grid(Q_LEN, KV_LEN, BATCHES, HEADS, {name: _as_loaded(name, table) for name, table in buffers.items()})


def _as_loaded(name: str, table: torch.Tensor) -> torch.Tensor:
    return table if name == "last" or table.dtype == torch.bool else table.to(torch.int32)


def facts_of(mask: Node) -> MaskFacts:
    return analyse_mask(Graph("mask", "mask", mask))


def with_case(grid: Grid, case: Case) -> Grid:
    return Grid(grid.q_len, grid.kv_len, grid.batches, grid.heads, grid.buffers, case.scalars)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_familiar_masks_are_sound_and_of_the_expected_tier(case: Case, grid: Grid) -> None:
    facts = facts_of(case.mask)
    assert facts.tier is case.tier, facts.because
    check_mask(case.mask, with_case(grid, case), facts)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize(("size", "columns"), [(4, 4), (8, 2), (3, 5)])
def test_familiar_masks_visit_no_tile_in_vain(case: Case, grid: Grid, size: int, columns: int) -> None:
    for axis in case.exact:
        found = visits(case.mask, with_case(grid, case), axis, size, columns)
        assert found.visited == found.ideal, f"{axis}: visited {found.visited} for {found.ideal}"
