"""Plans of sharded sequences, for any number of ranks and without any, against the dense mask."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.distributed import live_blocks
from flexgen.distributed import plan as plans
from flexgen.distributed.assignment import NAMES, Assignment
from flexgen.distributed.offsets import ShiftedMods
from flexgen.errors import OptionError, UnsupportedProblemError
from flexgen.runtime.mask_evaluation import IndexBox, evaluate_mask
from tests.torch import context_cases as mods


def chunked(b, h, q_idx, kv_idx):
    return (q_idx // 12 == kv_idx // 12) & (q_idx >= kv_idx)


def two_intervals(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((kv_idx < 7) | (q_idx - kv_idx < 5))


def overlapping_intervals(b, h, q_idx, kv_idx):
    return (kv_idx < 30) | ((kv_idx >= 20) & (kv_idx <= q_idx))


def nothing(b, h, q_idx, kv_idx):
    return q_idx < -kv_idx


STARTS = torch.arange(96) // 9 * 9


def since_start(b, h, q_idx, kv_idx):
    return (kv_idx >= STARTS[q_idx]) & (kv_idx <= q_idx)


EXACT = {
    "causal": mods.causal,
    "window": mods.window,
    "upside down": mods.upside_down,
    "per batch and head": mods.per_batch_and_head,
    "chunked": chunked,
    "two intervals": two_intervals,
    "overlapping intervals": overlapping_intervals,
    "nothing": nothing,
    "since start": since_start,
    "no mask": None,
}
BLOCKS = {"documents": mods.Documents(96).mask, "stripes": mods.prefix_and_stripes}
RANKS = [1, 2, 3, 4, 8]


@dataclass(frozen=True)
class Dense:
    """A mask of 2 batches and 2 heads: bool [2, 2, Lq, Lk]."""

    live: Tensor

    @classmethod
    def of(cls, mask: Any, q_len: int, kv_len: int) -> Dense:
        if mask is None:
            return cls(torch.ones(2, 2, q_len, kv_len, dtype=torch.bool))
        box = IndexBox(range(2), range(2), range(q_len), range(kv_len))
        return cls(evaluate_mask(mask, box, torch.device("cpu")))

    def box(self, queries: plans.Span, keys: plans.Span) -> tuple[plans.Span, plans.Span] | None:
        """Return the smallest ranges of queries and keys that hold the live pairs of two chunks."""
        part = self.live[:, :, queries.start : queries.stop, keys.start : keys.stop].flatten(0, 1).any(0)
        if not part.any():
            return None
        hulls = []
        for start, any_live in ((queries.start, part.any(1)), (keys.start, part.any(0))):
            places = any_live.nonzero()
            hulls.append(plans.Span(start + int(places[0]), start + int(places[-1]) + 1))
        return hulls[0], hulls[1]


def planned(mask: Any, ranks: int, assignment: str | None, q_len: int = 96, kv_len: int = 96, grain: int = 1):
    query, key = (torch.empty(2, 2, length, 16, device="meta") for length in (q_len, kv_len))
    with mock.patch.object(plans, "GRAIN", grain):
        return flexgen.plan_context_parallel(
            flexgen.compile(mask_mod=mask), query, key, key, ranks=ranks, assignment=assignment
        )


def covers(outer: plans.Span, inner: plans.Span) -> bool:
    return outer.start <= inner.start and outer.stop >= inner.stop


@pytest.mark.parametrize("assignment", NAMES)
@pytest.mark.parametrize("mask", EXACT.values(), ids=EXACT)
def test_intervals_are_planned_to_the_row(mask, assignment):
    for ranks, kv_len in itertools.product(RANKS, (96, 48)):
        plan, dense = planned(mask, ranks, assignment, kv_len=kv_len), Dense.of(mask, 96, kv_len)
        assert plan.boxes.is_exact
        for rank, owner in itertools.product(range(ranks), repeat=2):
            found = {(block.q_chunk, block.kv_chunk): (block.queries, block.keys) for block in plan.blocks(rank, owner)}
            held = itertools.product(*(plan.assignment.of_rank(one) for one in (rank, owner)))
            boxes = {pair: dense.box(plan.queries(pair[0]), plan.keys(pair[1])) for pair in held}
            for pair, box in boxes.items():
                assert (pair in found) >= (box is not None), (ranks, pair, "is live")
                if pair in found and box is not None:
                    assert all(map(covers, found[pair], box)), (ranks, pair, found[pair], box)
                if mask not in (since_start, mods.per_batch_and_head, two_intervals, chunked):
                    assert found.get(pair) == box, (ranks, pair)
        live = dense.live.sum((0, 1, 3))
        rows = [[plan.queries(chunk) for chunk in plan.assignment.of_rank(rank)] for rank in range(ranks)]
        assert list(plan.pairs) == [sum(int(live[one.start : one.stop].sum()) for one in own) for own in rows]


@pytest.mark.parametrize("assignment", NAMES)
@pytest.mark.parametrize("mask", BLOCKS.values(), ids=BLOCKS)
def test_other_masks_are_planned_soundly(mask, assignment):
    for ranks in RANKS:
        plan, dense = planned(mask, ranks, assignment), Dense.of(mask, 96, 96)
        assert plan.boxes.is_exact and sum(plan.pairs) == int(dense.live.sum())
        dead = 0
        for q_chunk, kv_chunk in itertools.product(range(plan.assignment.chunks), repeat=2):
            ends = [int(end[q_chunk, kv_chunk]) for end in ends_of(plan)]
            box = dense.box(plan.queries(q_chunk), plan.keys(kv_chunk))
            if box is not None:
                assert covers(plans.Span(*ends[:2]), box[0]) and covers(plans.Span(*ends[2:]), box[1])
            dead += not plan.boxes.live[q_chunk, kv_chunk]
        assert dead >= (plan.assignment.chunks - 1) ** 2 // 4  # of which a half and more would be right
        with mock.patch.object(live_blocks, "MOST_PAIRS", 0):
            estimated = planned(mask, ranks, assignment)
        assert not estimated.boxes.is_exact and sum(estimated.pairs) >= int(dense.live.sum())
        assert estimated.digest() == plan.digest()


def ends_of(plan: plans.ContextPlan) -> tuple[Tensor, ...]:
    return plan.boxes.q_lo, plan.boxes.q_hi, plan.boxes.kv_lo, plan.boxes.kv_hi


def scattered(b, h, q_idx, kv_idx):
    """Nothing is known of any block."""
    return (q_idx * kv_idx + h) % 3 == 0


def test_pairs_that_differ_between_heads_are_counted():
    plan, dense = planned(scattered, 4, "head-tail"), Dense.of(scattered, 96, 96)
    assert plan.boxes.is_exact and sum(plan.pairs) == int(dense.live.sum())
    assert bool(plan.boxes.live.all())


def test_documents_are_cut_to_what_is_live():
    numbers = torch.arange(4096) // 300

    def documents(b, h, q_idx, kv_idx):
        return numbers[q_idx] == numbers[kv_idx]

    plan = planned(documents, 4, "contiguous", 4096, 4096)
    assert [plan.of_rank(rank).reads for rank in range(4)] == [(1,), (0, 2), (1, 3), (2,)]
    (piece,) = plan.pieces(1, 0)
    assert 900 - 16 < piece.keys.start <= 900 and piece.keys.stop == 1024


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_window_reads_of_neighbours_alone(ranks):
    length = 128 * 2 * ranks
    for name in NAMES:
        plan = planned(mods.window, ranks, name, length, length, grain=16)
        held = [set(plan.assignment.of_rank(rank)) for rank in range(ranks)]
        for rank in range(ranks):
            before = {chunk - 1 for chunk in held[rank] if chunk} - held[rank]
            neighbours = {owner for owner in range(ranks) if held[owner] & before}
            assert set(plan.of_rank(rank).reads) == neighbours
        assert int(plan.rows.sum()) == 16 * sum(
            len(plan.pieces(r, o)) for r in range(ranks) for o in range(ranks) if r != o
        )


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_causal_work_is_even_with_head_tail_alone(ranks):
    even, uneven = (planned(mods.causal, ranks, name, 4096, 4096) for name in NAMES)
    assert even.imbalance == 1.0
    assert uneven.imbalance == pytest.approx(2 - 1 / ranks, rel=1e-2)
    assert sum(even.pairs) == sum(uneven.pairs) == 4 * 4096 * 4097 // 2


def test_the_choice_follows_the_predicted_work():
    causal = planned(mods.causal, 8, None, 4096, 4096)
    assert causal.assignment.name == "head-tail"
    assert causal.because == "the rank with the most work has 1.00 of the mean, 1.87 with contiguous"
    window = planned(mods.window, 8, None, 4096, 4096)
    assert window.assignment.name == "contiguous"
    assert window.because.endswith("; it sends less")
    full = planned(None, 8, None, 4096, 4096)
    assert full.assignment.name == "contiguous"
    assert full.because.endswith("; it takes fewer calls")
    assert planned(mods.causal, 8, "contiguous", 4096, 4096).because == "asked for"


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_chunk_is_held_once(name, ranks):
    assignment = Assignment(name, ranks)
    held = [chunk for rank in range(ranks) for chunk in assignment.of_rank(rank)]
    assert sorted(held) == list(range(assignment.chunks))
    assert all(list(assignment.of_rank(rank)) == sorted(assignment.of_rank(rank)) for rank in range(ranks))


def test_what_is_sent_is_received():
    plan = planned(mods.Documents(96).mask, 4, "head-tail")
    ranks = [plan.of_rank(rank) for rank in range(4)]
    row = 2 * 2 * (16 + 16) * 4  # batches, heads, head dims and bytes of float32
    for one in ranks:
        assert one.received == row * sum(p.keys.rows for owner in one.reads for p in plan.pieces(one.rank, owner))
        assert one.sent == row * sum(p.keys.rows for reader in one.read_by for p in plan.pieces(reader, one.rank))
        assert one.sent_backward == one.sent + one.received  # keys again, and gradients as wide as they are
    assert sum(one.sent for one in ranks) == sum(one.received for one in ranks) > 0
    half = torch.empty(1, 2, 96, 16, device="meta", dtype=torch.bfloat16)
    of_half = flexgen.plan_context_parallel(flexgen.compile(), half, half, half, ranks=2)
    assert of_half.grad_bytes == 2 * of_half.key_bytes


def test_plans_tell_each_other_apart():
    same, again, other = (planned(mask, 4, "head-tail") for mask in (mods.causal, mods.causal, mods.window))
    assert same.digest() == again.digest() != other.digest()
    assert planned(mods.causal, 4, "contiguous").digest() != same.digest()


@pytest.mark.parametrize("mask", [mods.causal, mods.window], ids=["causal", "window"])
def test_a_thousand_ranks_are_planned_in_seconds(mask):
    began = time.perf_counter()
    plan = planned(mask, 1024, None, 1 << 17, 1 << 17, grain=plans.GRAIN)
    assert time.perf_counter() - began < 20  # takes about 2
    assert len(plan.pairs) == 1024


def test_sequences_that_cannot_be_cut():
    with pytest.raises(UnsupportedProblemError, match="a query of 96 tokens cannot be cut in 10") as raised:
        planned(mods.causal, 5, "head-tail")
    assert "pad it to 100 tokens" in str(raised.value)
    with pytest.raises(UnsupportedProblemError, match="a key of 90 tokens cannot be cut in 8"):
        planned(mods.causal, 4, None, kv_len=90)
    with pytest.raises(OptionError, match="assignment='zigzag' is none"):
        planned(mods.causal, 2, "zigzag")
    with pytest.raises(OptionError, match="ranks=0 is no number of ranks"):
        planned(mods.causal, 0, None)


@pytest.mark.parametrize("mask", [mods.causal, mods.window], ids=["causal", "window"])
def test_chunks_that_begin_together_are_known_as_well_as_the_whole(mask):
    """What kernels are planned by: where distances alone matter, the number that is added to both indices cancels."""
    attention = flexgen.compile(mask_mod=mask)
    query = torch.empty(1, 1, 64, 16, device="meta")
    whole = attention.read(query, query, query)
    shifted = ShiftedMods.of(whole.captured)
    together, apart = shifted.reading(whole, 32, 32), shifted.reading(whole, 32, 16)
    assert (together.scalars, apart.scalars) == ((32,), (32, 16))
    known, expected = attention.understand(together).facts, attention.understand(whole).facts
    assert known.describe() == expected.describe()
    assert "q_offset - kv_offset" in attention.understand(apart).facts.describe()
    assert shifted.reading(whole, 16, 48).captured is apart.captured  # and its kernels


def test_captured_names_are_not_taken():
    q_offset = torch.arange(4)

    def mask(b, h, q_idx, kv_idx):
        return q_idx + q_offset[0] >= kv_idx

    attention = flexgen.compile(mask_mod=mask)
    query = torch.empty(1, 1, 64, 16, device="meta")
    whole = attention.read(query, query, query)
    assert [one.name for one in ShiftedMods.of(whole.captured).apart.captured.mods.scalars] == [
        "q_offset_2",
        "kv_offset",
    ]
