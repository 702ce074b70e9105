"""The plan of a sequence sharded over ranks as text: balance, traffic, and what links need to hide it."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen.distributed.plan import ContextPlan, RankPlan
from flexgen.explain_work import quantity, share
from flexgen.work import Sizes, useful_flops


def explain_plan(plan: ContextPlan, others: Sequence[ContextPlan], sizes: Sizes, rate: float | None) -> str:
    """Return what ranks hold, compute and send, by label.

    Args:
        others: plans of the same ranks with other assignments.
        sizes: of the call.
        rate: FLOP/s of matrix products of the chip, for what hides the traffic; None where it is not known.
    """
    ranks = [plan.of_rank(rank) for rank in range(plan.ranks)]
    rows = [
        ("assignment", f"{plan.assignment.name}   because: {plan.because}"),
        ("chunks", f"{plan.assignment.chunks:,} of {_lengths(plan)} each: {plan.assignment.why()}"),
        ("work", _work(plan)),
        *[("", f"{other.assignment.name} {_work(other)}") for other in others],
        ("reads", _reads(plan, ranks)),
        ("forward", _traffic(plan, [one.received for one in ranks], [one.sent for one in ranks])),
        ("backward", _traffic(plan, [one.received_backward for one in ranks], [one.sent_backward for one in ranks])),
        *([("hidden", _hidden(ranks, sizes, rate))] if rate else []),
    ]
    title = f"context parallel over {plan.ranks:,} {'rank' if plan.ranks == 1 else 'ranks'}"
    return "\n".join([title, *(f"  {label:<18} {text}" for label, text in rows)]) + "\n"


def _lengths(plan: ContextPlan) -> str:
    queries, keys = plan.queries(0).rows, plan.keys(0).rows
    return f"{queries:,} tokens" if queries == keys else f"{queries:,} queries and {keys:,} keys"


def _work(plan: ContextPlan) -> str:
    total = sum(plan.pairs)
    counted = "live pairs" if plan.boxes.is_exact else "pairs of blocks that may be live"
    mean, most = (quantity(number, "").strip() for number in (total / plan.ranks, max(plan.pairs)))
    return f"{mean} {counted} a rank, {most} at most: {plan.imbalance:.2f} of the mean"


def _reads(plan: ContextPlan, ranks: Sequence[RankPlan]) -> str:
    numbers = [len(one.reads) for one in ranks]
    live, pairs = sum(numbers), plan.ranks * (plan.ranks - 1)
    if not live:
        return "no rank reads keys of another"
    return f"keys of {_span(numbers)} other ranks: {live:,} of {pairs:,} pairs of ranks ({share(live, pairs)}) are live"


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _traffic(plan: ContextPlan, received: Sequence[int], sent: Sequence[int]) -> str:
    mean, most, most_sent = (quantity(n, "B") for n in (sum(received) / plan.ranks, max(received), max(sent)))
    return f"a rank receives {mean}, {most} at most, and sends {most_sent} at most; all {quantity(sum(received), 'B')}"


def _hidden(ranks: Sequence[RankPlan], sizes: Sizes, rate: float) -> str:
    """Return what a rank must receive a second so that its kernels, at the chip's peak, never wait."""
    forward = max(_needed(one.received, useful_flops(sizes, one.pairs), rate) for one in ranks)
    backward = max(_needed(one.received_backward, useful_flops(sizes, one.pairs, backward=True), rate) for one in ranks)
    if not forward and not backward:
        return "there is nothing to hide"
    each = [quantity(number, "B/s") for number in (forward, backward)]
    return f"behind kernels at the chip's peak where a rank receives {each[0]} forward, {each[1]} backward"


def _needed(received: int, flops: int, rate: float) -> float:
    return received * rate / flops if flops else 0.0
