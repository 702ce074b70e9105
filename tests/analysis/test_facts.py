"""The bounds read as a person would write them, and every conclusion says why."""

from __future__ import annotations

import time

import pytest
import torch

from flexgen.ir.graph import Graph, Node, const, input_node, make
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.facts import Direction, MaskFacts, Tier, analyse_mask
from flexgen.lowering.intervals import MAX_SEGMENTS
from flexgen.lowering.ranges import Range
from tests.analysis.expressions import CAUSAL, DISTANCE, I64, B, H, K, Q, index, load, scalar, test

DOCUMENTS = test("eq", load("document", Q), load("document", K))


def facts_of(mask: Node, **options: object) -> MaskFacts:
    return analyse_mask(Graph("mask", "mask", mask), **options)  # type: ignore[arg-type]


def texts(direction: Direction) -> list[str]:
    """Each segment as "visit_lo, visit_hi | full_lo, full_hi"."""

    def text(*ends: object) -> str:
        return ", ".join(f"{end.reduce or ''} {expression_text(end.node)}".strip() if end else "-" for end in ends)  # type: ignore[attr-defined]

    return [f"{text(s.visit_lo, s.visit_hi)} | {text(s.full_lo, s.full_hi)}" for s in direction.segments]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CAUSAL, "0, q_hi + 1 | 0, q_lo + 1"),
        (test("le", K, index("add", Q, scalar("offset"))), "0, q_hi + offset + 1 | 0, q_lo + offset + 1"),
        (
            test("and", CAUSAL, test("le", DISTANCE, 1024)),
            "q_lo - 1024, q_hi + 1 | q_hi - 1024, q_lo + 1",
        ),
        (test("or", CAUSAL, test("lt", K, scalar("prefix"))), "0, max(q_hi + 1, prefix) | 0, max(q_lo + 1, prefix)"),
        (test("lt", K, load("lengths", B)), "0, lengths[b] | 0, lengths[b]"),
        (
            test("ge", index("floordiv", Q, 128), index("floordiv", K, 128)),
            "0, q_hi // 128 * 128 + 128 | 0, q_lo // 128 * 128 + 128",
        ),
        (
            test("and", CAUSAL, test("ge", K, load("offsets", load("document", Q)))),
            "min offsets[document[q_idx]], q_hi + 1 | max offsets[document[q_idx]], q_lo + 1",
        ),
    ],
)
def test_bounds_read_as_one_would_write_them(mask: Node, expected: str) -> None:
    assert texts(facts_of(mask).kv) == [expected]


def test_sinks_and_window_are_two_sorted_segments() -> None:
    mask = test("and", CAUSAL, test("or", test("lt", K, 4), test("lt", DISTANCE, 128)))
    keys = facts_of(mask).kv
    assert texts(keys) == [
        "0, min(4, q_hi + 1) | 0, min(4, q_lo + 1)",
        "q_lo - 127, q_hi + 1 | q_hi - 127, q_lo + 1",
    ]
    assert keys.sorted


def test_segments_whose_order_depends_on_scalars_are_not_called_sorted() -> None:
    def between(lo: str, hi: str) -> Node:
        return test("and", test("ge", K, scalar(lo)), test("lt", K, scalar(hi)))

    assert not facts_of(test("or", between("a", "b"), between("c", "d"))).kv.sorted


def test_queries_of_a_key_come_from_the_same_analysis() -> None:
    mask = test("and", CAUSAL, test("le", DISTANCE, scalar("window")))
    assert texts(facts_of(mask).q) == ["kv_lo, kv_hi + window + 1 | kv_hi, kv_lo + window + 1"]


def test_one_head_per_tile_makes_a_window_per_head_closed() -> None:
    mask = test("and", CAUSAL, test("lt", DISTANCE, load("window", H)))
    assert facts_of(mask).tier is Tier.ROW_REDUCED
    assert texts(facts_of(mask, single_head=True).kv) == [
        "q_lo - window[h] + 1, q_hi + 1 | q_hi - window[h] + 1, q_lo + 1"
    ]


def test_documents_by_equality_keep_the_bound_of_the_causal_part() -> None:
    facts = facts_of(test("and", DOCUMENTS, CAUSAL))
    assert facts.tier is Tier.BLOCK_TABLE
    assert texts(facts.kv) == ["0, q_hi + 1 | -, -"]
    assert facts.because == (
        "(document[q_idx] == document[kv_idx]) is not solved for kv_idx: it loads document at an index that depends"
        " on kv_idx; live keys lie in [0, q_idx + 1)"
    )


def test_a_table_over_queries_and_keys_is_a_dense_loop() -> None:
    facts = facts_of(load("allowed", Q, K, dtype=torch.bool))
    assert facts.tier is Tier.DENSE
    assert texts(facts.kv) == ["0, KV_LEN | -, -"]


@pytest.mark.parametrize(
    ("mask", "tier", "segments"),
    [
        (const(True, torch.bool), Tier.ALL_TRUE, 1),
        (const(False, torch.bool), Tier.ALL_FALSE, 0),
        (test("ge", K, 0), Tier.ALL_TRUE, 1),
        (test("lt", Q, 0), Tier.ALL_FALSE, 0),
        (test("or", CAUSAL, test("gt", K, Q)), Tier.ALL_TRUE, 1),
        (test("and", test("gt", K, Q), test("lt", K, Q)), Tier.ALL_FALSE, 0),
    ],
)
def test_trivial_masks_are_found(mask: Node, tier: Tier, segments: int) -> None:
    facts = facts_of(mask)
    assert (facts.tier, len(facts.kv_segments), facts.q.tier) == (tier, segments, tier)


def test_no_mask_visits_every_key_and_is_safe_where_keys_exist() -> None:
    facts = analyse_mask(None)
    assert facts.tier is Tier.NO_MASK
    assert texts(facts.kv) == ["0, KV_LEN | 0, KV_LEN"]
    assert [expression_text(given) for given in facts.rows_safe.assumptions] == ["1 <= KV_LEN"]


@pytest.mark.parametrize(
    ("mask", "because"),
    [
        (CAUSAL, "kv_idx == 0 always passes the mask, given 1 <= KV_LEN"),
        (test("gt", K, Q), "kv_idx == q_idx + 1 always passes the mask, given Q_LEN < KV_LEN"),
        (
            test("and", CAUSAL, test("le", DISTANCE, scalar("window"))),
            "kv_idx == q_idx always passes the mask, given 0 <= window and Q_LEN <= KV_LEN",
        ),
        (test("and", DOCUMENTS, CAUSAL), "kv_idx == q_idx always passes the mask, given Q_LEN <= KV_LEN"),
        (test("lt", K, index("add", Q, 3)), "kv_idx == 0 always passes the mask, given 1 <= KV_LEN"),
    ],
)
def test_rows_are_proven_safe_by_a_witness(mask: Node, because: str) -> None:
    proof = facts_of(mask).rows_safe
    assert proof.holds
    assert proof.because == because


@pytest.mark.parametrize(
    "mask", [test("lt", K, Q), test("lt", K, load("lengths", B)), test("eq", K, index("sub", Q, 1))]
)
def test_masks_with_empty_rows_are_not_proven_safe(mask: Node) -> None:
    assert not facts_of(mask).rows_safe.holds


def test_bounds_name_the_scalars_and_buffers_that_they_trust() -> None:
    mask = test("lt", index("sub", K, load("start", Q, dtype=I64)), load("length", Q, dtype=I64))
    facts = facts_of(test("and", mask, test("le", DISTANCE, scalar("window"))))
    assert facts.trusted_buffers == ("length", "start")
    assert dict(facts.scalar_ranges) == {"window": Range(-(2**48), 2**48)}


def test_a_run_time_block_size_is_solved_where_its_sign_is_known() -> None:
    size = scalar("block")
    mask = test("ge", index("floordiv", Q, size), index("floordiv", K, size))
    assert facts_of(mask).tier is Tier.BLOCK_TABLE
    assert facts_of(mask, assume={"block": Range(1, 2**31 - 1)}).tier is Tier.CLOSED_FORM


def test_a_distance_compared_with_a_float_is_an_interval() -> None:
    distance = make("cast", index("abs", DISTANCE), dtype=torch.float32)
    mask = make("lt", distance, const(3.5, torch.float32), dtype=torch.bool)
    assert texts(facts_of(mask).kv) == ["q_lo - 3, q_hi + 4 | q_hi - 3, q_lo + 4"]


def test_many_intervals_are_merged_to_a_hull_and_called_inexact() -> None:
    bands = [test("eq", K, index("sub", Q, 10 * i)) for i in range(MAX_SEGMENTS + 3)]
    mask = bands[0]
    for band in bands[1:]:
        mask = test("or", mask, band)
    facts = facts_of(mask)
    assert len(facts.kv_segments) == MAX_SEGMENTS
    assert facts.tier is Tier.BLOCK_TABLE
    assert "more than 4 intervals" in facts.because


def test_reasons_use_the_names_that_the_user_gave() -> None:
    from flexgen.ir.origins import Origin, Origins

    facts = facts_of(test("and", DOCUMENTS, CAUSAL), origins=Origins({DOCUMENTS: (Origin("same_doc", None),)}))
    assert "same_doc" in facts.because


def test_long_masks_stay_within_their_time() -> None:
    mask = CAUSAL
    for tile in range(64):
        mask = test("or", mask, test("eq", load("selected", B, const(tile, I64)), index("floordiv", K, 64)))
    start = time.process_time()
    facts = facts_of(mask)
    assert time.process_time() - start < 2.0
    assert facts.tier is not Tier.DENSE


def test_deeply_nested_masks_do_not_recurse_without_limit() -> None:
    mask = CAUSAL
    for step in range(200):
        mask = test("not", test("and" if step % 2 else "or", mask, test("ne", K, index("add", Q, step))))
    assert facts_of(mask).kv_segments


def test_inputs_of_bounds_are_corners_lengths_and_rows_only() -> None:
    mask = test("or", test("and", CAUSAL, test("lt", DISTANCE, load("window", H))), test("lt", K, load("prefix", B)))
    facts = facts_of(mask)
    for direction, own in ((facts.kv, {"q_lo", "q_hi"}), (facts.q, {"kv_lo", "kv_hi"})):
        for bound in (bound for segment in direction.segments for bound in segment.bounds):
            names = {str(part.attr) for part in Graph("mask", "bound", bound.node).nodes() if part.op == "input"}
            row = {"q_idx", "kv_idx", "h"} if bound.reduce else own | {"h_lo", "h_hi"}
            assert names <= row | {"b", "Q_LEN", "KV_LEN"}
            assert (
                input_node("kv_idx" if direction is facts.kv else "q_idx")
                not in Graph("mask", "bound", bound.node).nodes()
            )
