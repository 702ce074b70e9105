"""The order of a rank's work: it computes with the keys it has while the next ones travel.

Forward, at each distance at which anything is live: wait for the keys of this distance, post the exchange of the next
one, then run the kernels of this one and merge what they return. Backward the same, with the final output and
logsumexp in place of a part's, which makes each call's gradients parts of the whole's; those of remote keys are sent
back once they are known, and arrive while the next kernels run. Gradients are added up in float32, in the order of
distances: the result does not depend on when messages arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexgen.distributed.merge import MergedRows, joined
from flexgen.distributed.ring_backward import RingBackward
from flexgen.distributed.ring_call import RingCall
from flexgen.distributed.shards import arrivals
from flexgen.runtime.differentiable import Saved, max_scores_gradient, once
from flexgen.runtime.outputs import dense_strides, output_order


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
        backward = RingBackward(ctx.call, whole, grad_output, grads[1], wanted)
        found = once(backward.run, (*inputs, grad_output, grads[1]))
        return (None, *map(found.get, names))


def _forward(call: RingCall, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    merged = {chunk: MergedRows(call.query_cover(chunk)) for chunk in call.chunks}
    for step, shard in arrivals(call, key, value):
        for block in step.blocks:
            rows = query[:, :, call.query_rows(block.q_chunk, block.queries)]
            reading = call.reading(block.queries.start, block.keys.start)
            keys, values = shard[block.kv_chunk].rows(block.keys)
            part = call.attention.run(reading, (rows, keys, values), call.extras)
            merged[block.q_chunk].add(block.queries.start - call.plan.queries(block.q_chunk).start, part)
    like = _outputs_like(call, query, value)
    totals = [rows_of_chunk.total(like) for rows_of_chunk in merged.values()]
    return {name: joined([total[name] for total in totals]) for name in like}


def _outputs_like(call: RingCall, query: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return tensors without rows that are as a call's outputs are otherwise, in the query's order in memory."""
    batch, heads = query.shape[:2]
    shape = (batch, heads, 0, value.shape[3])
    found = {"output": query.new_empty_strided(shape, dense_strides(shape, (*output_order(query), 3)))}
    statistic = query.new_empty((batch, heads, 0), dtype=_accumulator(query))
    names = ["logsumexp", *["max_scores"] * call.max_scores, *["logsumexp_tail"] * call.has_tail]
    return found | dict.fromkeys(names, statistic)


def _accumulator(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32
