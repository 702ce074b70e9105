"""Check one call against float64, forward and backward, and computed in other ways: what a found case calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexgen.attention import Attention
from flexgen.fuzzing.judge import Judge, Wrong
from flexgen.fuzzing.reference import STATISTICS, Problem, Values, gradients, loss_of
from flexgen.fuzzing.tally import Tally
from flexgen.fuzzing.ways import WAYS, Call, Outputs, in_order


def check_call(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    block_table: Any = None,
    cu_seqlens: tuple[Tensor, Tensor | None] | None = None,
    kv_lengths: Tensor | None = None,
    backward: bool = False,
    also: Sequence[str] = (),
    tally: Tally | None = None,
) -> None:
    """Check every output of a call, and every gradient.

    Args:
        attention: its mods are plain functions that hold the tensors they read in their closures.
        cu_seqlens: cu_seqlens_q and cu_seqlens_k of packed sequences.
        kv_lengths: how many keys each batch entry has.
        backward: check the gradients of all tensors that require grad.
        also: other ways to compute the same, of `WAYS`.
        tally: what is counted.

    Raises:
        Wrong: a result is further from float64 than its precision explains.
    """
    call = Call(query, key, value, scale, block_table, cu_seqlens, {"kv_lengths": kv_lengths})
    problem = Problem(
        in_order(query, attention),
        in_order(key, attention),
        in_order(value, attention),
        attention.score_mod,
        attention.mask_mod,
        scale,
        _lengths(cu_seqlens),
        backward,
        kv_lengths,
    )
    judge = Judge(problem, attention.options)
    leaves = {name: own for name, own in zip(problem.inputs, (query, key, value), strict=True) if own.requires_grad}
    run = _Run(problem, attention, leaves)
    judge.check(run.values(call.run(attention)))
    for name in also:
        judge.check(run.values(WAYS[name](attention, call)), f"computed {name}")
    if tally is not None:
        tally.count_call(attention, problem, also, judge.excused)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is asked of each computation of a call.

    Attributes:
        leaves: the inputs that require grad, in the attention's layout.
    """

    problem: Problem
    attention: Attention
    leaves: dict[str, Tensor]

    def values(self, outputs: Outputs) -> Values:
        """Return the outputs by name, and the gradients that they give."""
        found = dict(zip(("output", *STATISTICS), outputs, strict=True))
        if self.problem.backward:
            learned = self.problem.learned | self.leaves
            loss = loss_of(found["output"], found["logsumexp"], self.problem.query.dtype)
            for (name, tensor), grad in zip(learned.items(), gradients(loss, list(learned.values())), strict=True):
                if grad.dtype != tensor.dtype:
                    raise Wrong(f"gradient of {name} is {grad.dtype}, and the tensor {tensor.dtype}")
                found[f"gradient of {name}"] = in_order(grad, self.attention) if name in self.leaves else grad
        return {name: tensor.detach() for name, tensor in found.items()}


def _lengths(cu_seqlens: tuple[Tensor, Tensor | None] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if cu_seqlens is None:
        return None
    queries, keys = cu_seqlens[0], cu_seqlens[0] if cu_seqlens[1] is None else cu_seqlens[1]
    return tuple(queries.diff().tolist()), tuple(keys.diff().tolist())
