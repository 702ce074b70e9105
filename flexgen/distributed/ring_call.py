"""One rank's part of a call: what it runs, with whom it talks, and where its tensors have which rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen.attention import Attention
from flexgen.aux_outputs import AuxRequest
from flexgen.capture.live import Reading
from flexgen.distributed.exchange import Exchange
from flexgen.distributed.merge import Cover
from flexgen.distributed.plan import ContextPlan, Span, Step
from flexgen.extras import Extras


@dataclass(frozen=True, slots=True)
class RingCall:
    """One rank's part of a call.

    Attributes:
        attention: runs the kernels, with layout "bhsd".
        reading: (first query, first key) -> what a call reads whose indices begin there.
        plan: who computes and sends what.
        rank: of the group.
        steps: what this rank does, from the plan.
        exchange: the group.
        scale: the softmax scale; None for 1/sqrt(Dqk).
        max_scores: whether they are returned.
        has_tail: kernels give the logsumexp in two numbers.
    """

    attention: Attention
    reading: Callable[[int, int], Reading]
    plan: ContextPlan
    rank: int
    steps: tuple[Step, ...]
    exchange: Exchange
    scale: float | None
    max_scores: bool
    has_tail: bool

    @property
    def extras(self) -> Extras:
        return Extras(self.scale, AuxRequest(lse=True, max_scores=self.max_scores))

    @property
    def chunks(self) -> tuple[int, ...]:
        """This rank's chunks, in the order in which it holds them."""
        return self.plan.assignment.of_rank(self.rank)

    def query_rows(self, q_chunk: int, queries: Span) -> slice:
        """Return where this rank's tensors have queries of one of its chunks."""
        return _local(self.chunks.index(q_chunk), self.plan.queries(q_chunk), queries)

    def key_rows(self, kv_chunk: int, keys: Span) -> slice:
        """Return where this rank's tensors have keys of one of its chunks."""
        return _local(self.chunks.index(kv_chunk), self.plan.keys(kv_chunk), keys)

    def query_cover(self, chunk: int) -> Cover:
        """Return how this rank's blocks cover the queries of a chunk."""
        blocks = [block.queries for step in self.steps for block in step.blocks if block.q_chunk == chunk]
        return _cover(self.plan.queries(chunk), blocks)

    def key_cover(self, chunk: int) -> Cover:
        """Return how this rank's blocks, and the pieces that other ranks read, cover the keys of a chunk."""
        blocks = [block.keys for block in self.steps[0].blocks if block.kv_chunk == chunk]
        pieces = [piece.keys for step in self.steps for piece in step.given if piece.kv_chunk == chunk]
        return _cover(self.plan.keys(chunk), blocks + pieces)


def _cover(chunk: Span, parts: Sequence[Span]) -> Cover:
    return Cover.of(chunk.rows, [Span(part.start - chunk.start, part.stop - chunk.start) for part in parts])


def _local(place: int, chunk: Span, rows: Span) -> slice:
    start = place * chunk.rows + rows.start - chunk.start
    return slice(start, start + rows.rows)
