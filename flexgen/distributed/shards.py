"""Keys and values, or their gradients, of some rows of some chunks: views of a rank's own, or of a message."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.distributed.exchange import Pending, Post
from flexgen.distributed.plan import Piece, Span, Step
from flexgen.distributed.ring_call import RingCall


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
KEYS = ("key", "value")


def arrivals(call: RingCall, key: Tensor, value: Tensor) -> Iterator[tuple[Step, Shard]]:
    """Yield each step with the keys and values to compute with, while the next ones travel."""
    present = _own(call, key, value)
    for step, following in itertools.zip_longest(call.steps, call.steps[1:]):
        coming = None if following is None else _post_keys(call, following, key, value)
        yield step, present
        if coming is not None:
            pending, present = coming
            pending.wait()


def _own(call: RingCall, key: Tensor, value: Tensor) -> Shard:
    """Return a rank's own keys and values, as views."""
    found = {}
    for chunk in call.chunks:
        keys = call.plan.keys(chunk)
        rows = call.key_rows(chunk, keys)
        found[chunk] = Pair(key[:, :, rows], value[:, :, rows], keys.start)
    return found


def _post_keys(call: RingCall, step: Step, key: Tensor, value: Tensor) -> tuple[Pending, Shard]:
    """Start the exchange of a step; returns what will have arrived once it is waited for."""
    send = Post(step.reader, _packed(_own(call, key, value), step.given)) if step.given else None
    message, shard = room(step.wanted, key, value, key.dtype)
    return call.exchange.post(send, Post(step.owner, message) if step.wanted else None), shard


def _packed(shard: Shard, pieces: Sequence[Piece]) -> Tensor:
    """Return pieces as one flat tensor: of each the keys, then the values."""
    parts = [part for piece in pieces for part in shard[piece.kv_chunk].rows(piece.keys)]
    return torch.cat([part.reshape(-1) for part in parts])


def room(pieces: Sequence[Piece], key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Shard]:
    """Return a flat tensor that has room for pieces, and its parts: views of it.

    Args:
        key, value: of which only batch, heads and head dims matter.
    """
    shapes = [(*t.shape[:2], piece.keys.rows, t.shape[3]) for piece in pieces for t in (key, value)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = key.new_empty(sum(sizes), dtype=dtype)
    starts = itertools.accumulate(sizes, initial=0)
    parts = [flat.narrow(0, start, n).view(shape) for start, n, shape in zip(starts, sizes, shapes, strict=False)]
    pairs = zip(pieces, parts[::2], parts[1::2], strict=True)
    return flat, {piece.kv_chunk: Pair(first, second, piece.keys.start) for piece, first, second in pairs}
