"""What ranks hold, compute and send each other: for any number of ranks, without any process.

A rank reads the keys and values of a chunk from the rank that owns it, not from a neighbour that passes them on, so
that what is dead is never sent. At distance t, rank r reads from rank r - t and is read by rank r + t, modulo R: each
rank sends and receives one message at most, and distances at which nothing is live do not exist. In the backward the
keys and values travel again, so that memory holds but a few messages whatever the number of ranks, and the gradients of
a message travel back in float32 to where it came from.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.distributed.assignment import Assignment, check_cut
from flexgen.distributed.live_boxes import LiveBoxes, live_boxes
from flexgen.distributed.whole_mask import Extent, WholeMask

# Ends of what is computed and sent are rounded outwards to multiples of it, as far as the chunk goes: then most have
# lengths that tiles divide, so that few kernels are needed (problem.DIVISOR).
GRAIN = 128
ABOUT_EQUAL = 1.05  # guess: a twentieth of the kernels' time is about what fewer and smaller messages save


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, stop) of the whole sequence."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """One call of a kernel: rows of a chunk of queries, and those rows of a chunk of keys that they see.

    Attributes:
        q_chunk, kv_chunk: numbers of the chunks.
        queries, keys: the rows, of the whole sequence.
    """

    q_chunk: int
    kv_chunk: int
    queries: Span
    keys: Span


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of keys and values of one chunk that travel together.

    Attributes:
        kv_chunk: the number of the chunk.
        keys: the rows, of the whole sequence.
    """

    kv_chunk: int
    keys: Span


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does at one distance.

    Attributes:
        owner: the rank whose keys it reads; itself at distance 0.
        reader: the rank that reads its own.
        blocks: what it computes.
        wanted, given: what it receives of the owner and sends to the reader; nothing at distance 0.
    """

    owner: int
    reader: int
    blocks: tuple[Block, ...]
    wanted: tuple[Piece, ...]
    given: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank holds, sends and computes.

    Attributes:
        rank: its number.
        queries, keys: the chunks that it holds.
        reads: the other ranks of which it reads keys and values.
        read_by: the other ranks that read its own.
        sent, received: bytes of a forward.
        sent_backward, received_backward: bytes of a backward.
        pairs: live pairs of its queries, of all batches and heads.
    """

    rank: int
    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    reads: tuple[int, ...]
    read_by: tuple[int, ...]
    sent: int
    received: int
    sent_backward: int
    received_backward: int
    pairs: int


@dataclass(frozen=True, slots=True, eq=False)
class ContextPlan:
    """Who computes and sends what.

    Attributes:
        assignment: which chunks each rank holds.
        extent: the sizes of the call.
        boxes: what is live of each pair of chunks.
        rows: int64 [ranks, ranks]: how many rows of keys the first reads of the second; 0 of itself.
        pairs: live pairs of each rank's queries, of all batches and heads.
        because: why the ranks hold these chunks, where there was a choice.
    """

    assignment: Assignment
    extent: Extent
    boxes: LiveBoxes
    rows: Tensor
    pairs: tuple[int, ...]
    because: str = "asked for"

    @property
    def ranks(self) -> int:
        return self.assignment.ranks

    @property
    def imbalance(self) -> float:
        """The largest number of live pairs of a rank over the mean: the least share of time that others wait for it."""
        return max(self.pairs) * self.ranks / sum(self.pairs) if sum(self.pairs) else 1.0

    @property
    def distances(self) -> tuple[int, ...]:
        """How far apart in number ranks are that exchange anything: all t for which a rank r reads of rank r - t."""
        reader, owner = self.rows.nonzero(as_tuple=True)
        return tuple(sorted(set(((reader - owner) % self.ranks).tolist())))

    def queries(self, chunk: int) -> Span:
        """Return the rows of a chunk of queries."""
        return _chunk(self.extent.q_len, self.assignment.chunks, chunk)

    def keys(self, chunk: int) -> Span:
        """Return the rows of a chunk of keys."""
        return _chunk(self.extent.kv_len, self.assignment.chunks, chunk)

    def blocks(self, rank: int, owner: int) -> tuple[Block, ...]:
        """Return what a rank computes with keys of another, or its own."""
        boxes, found = self.boxes, []
        for q_chunk in self.assignment.of_rank(rank):
            for kv_chunk in self.assignment.of_rank(owner):
                ends = [int(end[q_chunk, kv_chunk]) for end in (boxes.q_lo, boxes.q_hi, boxes.kv_lo, boxes.kv_hi)]
                if ends[0] < ends[1]:
                    found.append(Block(q_chunk, kv_chunk, Span(*ends[:2]), Span(*ends[2:])))
        return tuple(found)

    def pieces(self, reader: int, owner: int) -> tuple[Piece, ...]:
        """Return what a rank reads of another's keys: of each chunk one range of rows at most."""
        blocks = self.blocks(reader, owner)
        found = []
        for chunk in self.assignment.of_rank(owner):
            spans = [block.keys for block in blocks if block.kv_chunk == chunk]
            if spans:
                hull = Span(min(span.start for span in spans), max(span.stop for span in spans))
                found.append(Piece(chunk, hull))
        return tuple(found)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return what a rank does at each distance, 0 first; all ranks have the same distances."""
        found = [Step(rank, rank, self.blocks(rank, rank), (), ())]
        for distance in self.distances:
            owner, reader = (rank - distance) % self.ranks, (rank + distance) % self.ranks
            pieces = self.pieces(rank, owner), self.pieces(reader, rank)
            found.append(Step(owner, reader, self.blocks(rank, owner), *pieces))
        return tuple(found)

    def of_rank(self, rank: int) -> RankPlan:
        """Return what a rank holds, sends and computes."""
        chunks = self.assignment.of_rank(rank)
        received, sent = int(self.rows[rank].sum()), int(self.rows[:, rank].sum())
        keys, grads = self.key_bytes, self.grad_bytes
        return RankPlan(
            rank,
            tuple(map(self.queries, chunks)),
            tuple(map(self.keys, chunks)),
            tuple(self.rows[rank].nonzero()[:, 0].tolist()),
            tuple(self.rows[:, rank].nonzero()[:, 0].tolist()),
            sent=sent * keys,
            received=received * keys,
            sent_backward=sent * keys + received * grads,
            received_backward=received * keys + sent * grads,
            pairs=self.pairs[rank],
        )

    @property
    def key_bytes(self) -> int:
        """Bytes of one row of keys and values, of all batches and heads."""
        return self._row_elements * self.extent.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients of one row of keys and values, as they travel: float32, of float64 float64."""
        return self._row_elements * max(self.extent.dtype.itemsize, torch.float32.itemsize)

    @property
    def _row_elements(self) -> int:
        extent = self.extent
        return extent.kv_batch * extent.kv_heads * (extent.qk_head_dim + extent.v_head_dim)

    def digest(self) -> int:
        """Return a number of 62 bits that is the same where the plans are: ranks compare theirs."""
        boxes = self.boxes
        told = hashlib.blake2b(f"{self.assignment} {self.extent}".encode(), digest_size=8)
        for end in (boxes.q_lo, boxes.q_hi, boxes.kv_lo, boxes.kv_hi):
            told.update(end.contiguous().numpy().tobytes())
        return int.from_bytes(told.digest()) >> 2


def make_plan(mask: WholeMask, extent: Extent, assignment: Assignment, *, count: bool = True) -> ContextPlan:
    """Work out who computes and sends what.

    Args:
        mask: of the whole sequence.
        count: see `live_boxes`; what is computed and sent does not depend on it.

    Raises:
        UnsupportedProblemError: the sequence cannot be cut in equal chunks.
    """
    check_cut("a query", extent.q_len, assignment)
    check_cut("a key", extent.kv_len, assignment)
    boxes = live_boxes(mask, assignment.chunks, GRAIN, count=count)
    held = torch.tensor([assignment.of_rank(rank) for rank in range(assignment.ranks)], device="cpu")
    chunk_pairs = torch.tensor(boxes.pairs, dtype=torch.int64, device="cpu")
    pairs = chunk_pairs[held].sum(1).tolist()
    return ContextPlan(assignment, extent, boxes, _rows(boxes, held), tuple(pairs))


def choose_plan(plans: Sequence[ContextPlan]) -> ContextPlan:
    """Return the plan whose rank with the most work has the least of it; of about equal ones, that which sends less."""
    least = min(max(plan.pairs) for plan in plans)
    even = [plan for plan in plans if max(plan.pairs) <= least * ABOUT_EQUAL]
    chosen = min(even, key=lambda plan: (int(plan.rows.sum()), plan.assignment.chunks))
    others = [f"{one.imbalance:.2f} with {one.assignment.name}" for one in plans if one is not chosen]
    if not others:
        return chosen
    because = f"the rank with the most work has {chosen.imbalance:.2f} of the mean, {', '.join(others)}"
    if len(even) > 1:
        sends_less = any(int(one.rows.sum()) > int(chosen.rows.sum()) for one in even)
        because += "; it sends less" if sends_less else "; it takes fewer calls"
    return dataclasses.replace(chosen, because=because)


def _rows(boxes: LiveBoxes, held: Tensor) -> Tensor:
    """Return how many rows of keys each rank reads of each other: int64 [ranks, ranks].

    Args:
        held: int64 [ranks, chunks of a rank].
    """
    none = torch.iinfo(torch.int64).max
    lo = torch.where(boxes.live, boxes.kv_lo, none)[held].amin(1)  # [ranks, chunks]
    hi = boxes.kv_hi[held].amax(1)
    rows = torch.where(lo < hi, hi - lo, 0)[:, held].sum(2)
    return rows.fill_diagonal_(0)


def _chunk(length: int, chunks: int, number: int) -> Span:
    size = length // chunks
    return Span(number * size, (number + 1) * size)
