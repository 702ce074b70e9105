"""The backward of a rank: gradients of its queries, and of keys wherever they are."""

from __future__ import annotations

import torch
from torch import Tensor

from flexgen.distributed.exchange import Pending, Post
from flexgen.distributed.merge import RowSums, joined
from flexgen.distributed.plan import Block, Step
from flexgen.distributed.ring_call import RingCall
from flexgen.distributed.shards import KEYS, Shard, arrivals, room
from flexgen.runtime.differentiable import Gradients, Saved


class RingBackward:
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
        self._dtype = dtype = saved.logsumexp.dtype  # of all sums
        self._query_sums = {chunk: RowSums(call.query_cover(chunk), dtype) for chunk in call.chunks}
        covers = {chunk: call.key_cover(chunk) for chunk in call.chunks}
        self._key_sums = {chunk: {name: RowSums(cover, dtype) for name in KEYS} for chunk, cover in covers.items()}
        self._buffer_sums = {
            f"buffer {index}": torch.zeros_like(buffer, dtype=torch.promote_types(buffer.dtype, dtype))
            for index, buffer in enumerate(saved.buffers)
            if f"buffer {index}" in wanted
        }

    def run(self) -> Gradients:
        """Return the wanted gradients by name."""
        call, saved = self._call, self._saved
        returned: tuple[Pending, Shard] | None = None
        for step, shard in arrivals(call, saved.key, saved.value):
            if step is call.steps[0]:
                for block in step.blocks:
                    self._add_own(block, self._gradients(block, shard))
                continue
            message, sums = room(step.wanted, saved.key, saved.value, self._dtype)
            message.zero_()
            for block in step.blocks:
                self._add_foreign(block, self._gradients(block, shard), sums)
            if not self._wanted.isdisjoint(KEYS):
                self._collect(returned)
                returned = self._post(step, message)
        self._collect(returned)
        return self._totals()

    def _gradients(self, block: Block, shard: Shard) -> Gradients:
        """Run the kernels of one block; the gradients of queries and captured tensors are added to their sums."""
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
        found = call.attention.gradients(
            call.reading(block.queries.start, block.keys.start),
            (query, key, value),
            call.extras,
            part,
            self._grad_output[:, :, rows],
            None if self._grad_logsumexp is None else self._grad_logsumexp[:, :, rows],
            self._wanted,
        )
        if "query" in found:
            start = block.queries.start - call.plan.queries(block.q_chunk).start
            self._query_sums[block.q_chunk].add(start, found["query"])
        for name, total in self._buffer_sums.items():
            total.add_(found[name])
        return {name: self._of_batch(found[name], getattr(saved, name)) for name in KEYS if name in found}

    def _of_batch(self, grad: Tensor, tensor: Tensor) -> Tensor:
        """Return the gradient of a tensor that all batches may share."""
        return grad if grad.shape[0] == tensor.shape[0] else grad.sum(0, keepdim=True, dtype=self._dtype)

    def _add_own(self, block: Block, found: Gradients) -> None:
        start = block.keys.start - self._call.plan.keys(block.kv_chunk).start
        for name, grad in found.items():
            self._key_sums[block.kv_chunk][name].add(start, grad)

    @staticmethod
    def _add_foreign(block: Block, found: Gradients, sums: Shard) -> None:
        rows = dict(zip(KEYS, sums[block.kv_chunk].rows(block.keys), strict=True))
        for name, grad in found.items():
            rows[name].add_(grad)

    def _post(self, step: Step, message: Tensor) -> tuple[Pending, Shard]:
        """Send the gradients of a step's keys back, and start receiving those of this rank's own."""
        received, shard = room(step.given, self._saved.key, self._saved.value, self._dtype)
        send = Post(step.owner, message) if step.wanted else None
        return self._call.exchange.post(send, Post(step.reader, received) if step.given else None), shard

    def _collect(self, returned: tuple[Pending, Shard] | None) -> None:
        """Add gradients that come back to those of this rank's own keys."""
        if returned is None:
            return
        pending, shard = returned
        pending.wait()
        for chunk, pair in shard.items():
            start = pair.start - self._call.plan.keys(chunk).start
            for name, grad in zip(KEYS, (pair.first, pair.second), strict=True):
                self._key_sums[chunk][name].add(start, grad)

    def _totals(self) -> Gradients:
        saved, found = self._saved, {}
        if "query" in self._wanted:
            found["query"] = joined([sums.total(saved.query) for sums in self._query_sums.values()])
        for name in KEYS:
            if name in self._wanted:
                like: Tensor = getattr(saved, name)
                found[name] = joined([sums[name].total(like) for sums in self._key_sums.values()])
        for name, total in self._buffer_sums.items():
            found[name] = total.to(saved.buffers[int(name.split()[1])].dtype)
        return found
