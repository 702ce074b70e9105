"""The order of a rank's work: it computes with the keys it has while the next ones travel.

Forward, at each distance at which anything is live: wait for the keys of this distance, post the exchange of the next
one, then run the kernels of this one and merge what they return. Backward the same, with the final output and
logsumexp in place of a part's, which makes each call's gradients parts of the whole's; those of remote keys are sent
back once they are known, and arrive while the next kernels run. Gradients are added up in float32, in the order of
distances: the result does not depend on when messages arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen.attention import Attention
from flexgen.aux_outputs import AuxRequest
from flexgen.capture.live import Reading
from flexgen.distributed.exchange import Exchange, Pending, Post
from flexgen.distributed.merge import MergedRows
from flexgen.distributed.plan import Block, ContextPlan, Piece, Span
from flexgen.extras import Extras
from flexgen.runtime.differentiable import Gradients, Saved, max_scores_gradient, once
from flexgen.runtime.outputs import dense_strides, memory_order


@dataclass(frozen=True, slots=True)
class RingCall:
    """One rank's part of a call.

    Attributes:
        attention: runs the kernels, with layout "bhsd".
        reading: (first query, first key) -> what a call reads whose indices begin there.
        plan: who computes and sends what.
        rank: of the group.
        exchange: the group.
        scale: the softmax scale; None for 1/sqrt(Dqk).
        max_scores: whether they are returned.
        has_tail: kernels give the logsumexp in two numbers.
    """

    attention: Attention
    reading: Callable[[int, int], Reading]
    plan: ContextPlan
    rank: int
    exchange: Exchange
    scale: float | None
    max_scores: bool
    has_tail: bool

    @property
    def extras(self) -> Extras:
        return Extras(self.scale, AuxRequest(lse=True, max_scores=self.max_scores))

    def owner(self, distance: int) -> int:
        """Return the rank whose keys this one reads at a distance."""
        return (self.rank - distance) % self.plan.ranks

    def reader(self, distance: int) -> int:
        """Return the rank that reads this one's keys at a distance."""
        return (self.rank + distance) % self.plan.ranks

    def query_rows(self, q_chunk: int, queries: Span) -> slice:
        """Return where this rank's tensors have queries of one of its chunks."""
        whole = self.plan.queries(q_chunk)
        return _local(self.plan.assignment.of_rank(self.rank).index(q_chunk), whole, queries)

    def key_rows(self, kv_chunk: int, keys: Span) -> slice:
        """Return where this rank's tensors have keys of one of its chunks."""
        whole = self.plan.keys(kv_chunk)
        return _local(self.plan.assignment.of_rank(self.rank).index(kv_chunk), whole, keys)


def _local(place: int, chunk: Span, rows: Span) -> slice:
    start = place * chunk.rows + rows.start - chunk.start
    return slice(start, start + rows.rows)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors with a row for each key: keys and values, or their gradients.

    Attributes:
        first, second: [B, Hkv, n, Dqk] and [B, Hkv, n, Dv].
        start: the whole sequence's index of the first row.
    """

    first: Tensor
    second: Tensor
    start: int

    def rows(self, keys: Span) -> tuple[Tensor, Tensor]:
        """Return the rows of some keys, as views."""
        rows = slice(keys.start - self.start, keys.stop - self.start)
        return self.first[:, :, rows], self.second[:, :, rows]


Shard = Mapping[int, Pair]  # by chunk of keys


def run_ring(call: RingCall, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> dict[str, Tensor]:
    """Compute a rank's attention, recorded for autograd where that is wanted.

    Args:
        tensors: query, key and value of this rank, [B, H, L, D].
        buffers: the captured tensors.

    Returns:
        "output", "logsumexp", and "max_scores" if asked for.
    """
    results = _Ring.apply(call, *tensors, *buffers)  # type: ignore[no-untyped-call]
    return dict(zip(("output", "logsumexp", "max_scores"), results, strict=False))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RingCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = _forward(call, *inputs[:3])
        ctx.call, ctx.input_count = call, len(inputs)
        ctx.save_for_backward(*inputs, outputs["output"], outputs["logsumexp"], outputs.get("logsumexp_tail"))
        ctx.set_materialize_grads(False)
        return tuple(outputs[name] for name in ("output", "logsumexp", "max_scores") if name in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if len(grads) > 2 and grads[2] is not None:
            raise max_scores_gradient()
        saved = ctx.saved_tensors
        inputs = saved[: ctx.input_count]
        query, key, value, *buffers = inputs
        output, logsumexp, tail = saved[ctx.input_count :]
        names = ["query", "key", "value", *(f"buffer {index}" for index in range(len(buffers)))]
        wanted = frozenset(name for name, needs in zip(names, ctx.needs_input_grad[1:], strict=True) if needs)
        grad_output = grads[0] if grads[0] is not None else torch.zeros_like(output)
        whole = Saved(query, key, value, output, logsumexp, tail, tuple(buffers))
        backward = _Backward(ctx.call, whole, grad_output, grads[1], wanted)
        found = once(backward.run, (*inputs, grad_output, grads[1]))
        return (None, *map(found.get, names))


# Keys and values on their way.


def _arrivals(call: RingCall, key: Tensor, value: Tensor) -> Iterator[tuple[int, Shard]]:
    """Yield each distance, 0 first, with the keys and values to compute with, while the next ones travel."""
    yield_now, distances = _own(call, key, value), (0, *call.plan.distances)
    for place, distance in enumerate(distances):
        following = None
        if place + 1 < len(distances):
            following = _post_keys(call, distances[place + 1], key, value)
        yield distance, yield_now
        if following is not None:
            pending, yield_now = following
            pending.wait()


def _own(call: RingCall, first: Tensor, second: Tensor) -> Shard:
    """Return a rank's own rows, or their gradients, by chunk: views."""
    found = {}
    for chunk in call.plan.assignment.of_rank(call.rank):
        keys = call.plan.keys(chunk)
        rows = call.key_rows(chunk, keys)
        found[chunk] = Pair(first[:, :, rows], second[:, :, rows], keys.start)
    return found


def _post_keys(call: RingCall, distance: int, key: Tensor, value: Tensor) -> tuple[Pending, Shard]:
    """Start the exchange of a distance; returns what will have arrived once it is waited for."""
    owner, reader = call.owner(distance), call.reader(distance)
    wanted, given = call.plan.pieces(call.rank, owner), call.plan.pieces(reader, call.rank)
    own = _own(call, key, value)
    send = Post(reader, _packed(own, given)) if given else None
    message, shard = _room(wanted, key, value, key.dtype)
    return call.exchange.post(send, Post(owner, message) if wanted else None), shard


def _packed(shard: Shard, pieces: Sequence[Piece]) -> Tensor:
    """Return pieces as one flat tensor: of each the keys, then the values."""
    parts = [part for piece in pieces for part in shard[piece.kv_chunk].rows(piece.keys)]
    return torch.cat([part.reshape(-1) for part in parts])


def _room(
    pieces: Sequence[Piece], key: Tensor, value: Tensor, dtype: torch.dtype, *, zero: bool = False
) -> tuple[Tensor, Shard]:
    """Return a flat tensor that has room for pieces, and its parts: views of it.

    Args:
        key, value: of which only batch, heads and head dims matter.
        zero: begin with zeros.
    """
    shapes = [(*t.shape[:2], piece.keys.rows, t.shape[3]) for piece in pieces for t in (key, value)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = key.new_zeros(sum(sizes), dtype=dtype) if zero else key.new_empty(sum(sizes), dtype=dtype)
    starts = itertools.accumulate(sizes, initial=0)
    parts = [flat.narrow(0, start, n).view(shape) for start, n, shape in zip(starts, sizes, shapes, strict=False)]
    pairs = zip(pieces, parts[::2], parts[1::2], strict=True)
    return flat, {piece.kv_chunk: Pair(first, second, piece.keys.start) for piece, first, second in pairs}


# Forward.


def _forward(call: RingCall, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    plan = call.plan
    merged = {chunk: MergedRows(plan.queries(chunk).rows) for chunk in plan.assignment.of_rank(call.rank)}
    for distance, shard in _arrivals(call, key, value):
        for block in plan.blocks(call.rank, call.owner(distance)):
            rows = query[:, :, call.query_rows(block.q_chunk, block.queries)]
            reading = call.reading(block.queries.start, block.keys.start)
            keys, values = shard[block.kv_chunk].rows(block.keys)
            part = call.attention.run(reading, (rows, keys, values), call.extras)
            merged[block.q_chunk].add(block.queries.start - plan.queries(block.q_chunk).start, part)
    outputs = _allocated(call, query, value)
    for chunk, rows_of_chunk in merged.items():
        rows_of_chunk.write(outputs, call.query_rows(chunk, plan.queries(chunk)).start)
    return outputs


def _allocated(call: RingCall, query: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return room for a rank's results; the output lies in memory in the query's order, columns innermost."""
    rows, dtype = query.shape[:3], torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = (*rows, value.shape[3])
    order = [*(dim for dim in memory_order(query) if dim != 3), 3]
    outputs = {"output": query.new_empty_strided(shape, dense_strides(shape, order))}
    outputs["logsumexp"] = query.new_empty(rows, dtype=dtype)
    if call.max_scores:
        outputs["max_scores"] = query.new_empty(rows, dtype=dtype)
    if call.has_tail:
        outputs["logsumexp_tail"] = query.new_zeros(rows, dtype=dtype)
    return outputs


# Backward.


class _Backward:
    """One backward of a rank.

    Args:
        saved: the rank's tensors, and its final output and logsumexp.
        grad_output, grad_logsumexp: the gradients in them.
        wanted: "query", "key", "value" and "buffer <i>", of what a gradient is wanted; the same on all ranks.
    """

    def __init__(
        self,
        call: RingCall,
        saved: Saved,
        grad_output: Tensor,
        grad_logsumexp: Tensor | None,
        wanted: frozenset[str],
    ) -> None:
        self._call, self._saved, self._wanted = call, saved, wanted
        self._grad_output, self._grad_logsumexp = grad_output, grad_logsumexp
        self._dtype = saved.logsumexp.dtype  # of all sums
        self._grad_query = torch.zeros_like(saved.query, dtype=self._dtype)
        self._grad_key, self._grad_value = (
            torch.zeros_like(tensor, dtype=self._dtype) for tensor in (saved.key, saved.value)
        )
        self._grad_buffers = {
            f"buffer {index}": torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, self._dtype))
            for index, buffer in enumerate(saved.buffers)
            if f"buffer {index}" in wanted
        }
        self._returns = not wanted.isdisjoint({"key", "value"})

    def run(self) -> Gradients:
        """Return the wanted gradients by name."""
        call, saved = self._call, self._saved
        own = _own(call, self._grad_key, self._grad_value)
        coming: tuple[Pending, Shard] | None = None
        for distance, shard in _arrivals(call, saved.key, saved.value):
            owner = call.owner(distance)
            message, sums = None, own
            if distance:
                pieces = call.plan.pieces(call.rank, owner)
                message, sums = _room(pieces, saved.key, saved.value, self._dtype, zero=True)
            for block in call.plan.blocks(call.rank, owner):
                self._add(block, shard, sums)
            if message is not None and self._returns:
                self._collect(coming)
                coming = self._post(distance, message)
        self._collect(coming)
        found = {"query": self._grad_query, "key": self._grad_key, "value": self._grad_value}
        found = {name: grad.to(saved.query.dtype) for name, grad in found.items() if name in self._wanted}
        for name, total in self._grad_buffers.items():
            found[name] = total.to(saved.buffers[int(name.split()[1])].dtype)
        return found

    def _add(self, block: Block, shard: Shard, sums: Shard) -> None:
        """Add the gradients of one block."""
        call, saved = self._call, self._saved
        rows = call.query_rows(block.q_chunk, block.queries)
        query = saved.query[:, :, rows]
        key, value = shard[block.kv_chunk].rows(block.keys)
        batch = query.shape[0]
        part = Saved(
            query,
            key.expand(batch, -1, -1, -1),
            value.expand(batch, -1, -1, -1),
            saved.output[:, :, rows],
            saved.logsumexp[:, :, rows].contiguous(),  # kernels know no strides of it
            None if saved.tail is None else saved.tail[:, :, rows].contiguous(),
            saved.buffers,
        )
        grad_logsumexp = None if self._grad_logsumexp is None else self._grad_logsumexp[:, :, rows]
        found = call.attention.gradients(
            call.reading(block.queries.start, block.keys.start),
            (query, key, value),
            call.extras,
            part,
            self._grad_output[:, :, rows],
            grad_logsumexp,
            self._wanted,
        )
        key_sum, value_sum = sums[block.kv_chunk].rows(block.keys)
        targets = {"query": self._grad_query[:, :, rows], "key": key_sum, "value": value_sum, **self._grad_buffers}
        for name, grad in found.items():
            total = targets[name]
            total.add_(grad if grad.shape == total.shape else grad.sum(0, keepdim=True, dtype=total.dtype))

    def _post(self, distance: int, message: Tensor) -> tuple[Pending, Shard]:
        """Send the gradients of a distance's keys back, and start receiving those of this rank's own."""
        call = self._call
        reader = call.reader(distance)
        pieces = call.plan.pieces(reader, call.rank)
        received, shard = _room(pieces, self._saved.key, self._saved.value, self._dtype)
        send = Post(call.owner(distance), message) if message.numel() else None
        return call.exchange.post(send, Post(reader, received) if pieces else None), shard

    def _collect(self, coming: tuple[Pending, Shard] | None) -> None:
        """Add gradients that arrive to those of this rank's own keys."""
        if coming is None:
            return
        pending, shard = coming
        pending.wait()
        own = _own(self._call, self._grad_key, self._grad_value)
        for chunk, pair in shard.items():
            keys = Span(pair.start, pair.start + pair.first.shape[2])
            for total, grad in zip(own[chunk].rows(keys), (pair.first, pair.second), strict=True):
                total.add_(grad)
