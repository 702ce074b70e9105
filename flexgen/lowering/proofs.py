"""Proofs about the rows of a mask: that each has a live key, and that its live keys are contiguous."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flexgen.ir.graph import Node, input_node, topological
from flexgen.lowering.bounds import Box, BoxEvaluator
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.intervals import RowSet
from flexgen.lowering.ranges import INDEX, Range
from flexgen.lowering.symbols import FALSE, KV_LEN, Q_LEN, TRUE, ZERO, Algebra, conjuncts, is_small

_Q_IDX, _KV_IDX = input_node("q_idx"), input_node("kv_idx")
_SOME = Range(1, INDEX.hi)
_MAX_WITNESSES = 8
_MAX_CONDITION_SIZE = 10


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether a property is proven, and why.

    Attributes:
        holds: proven, given the assumptions; otherwise nothing is known.
        because: the reason, for people.
        assumptions: conditions over lengths and scalars alone, all of which the launch must meet.
    """

    holds: bool
    because: str
    assumptions: tuple[Node, ...] = ()


def prove_rows_safe(mask: Node, rows: RowSet, algebra: Algebra) -> Proof:
    """Prove that every query in [0, Q_LEN) has a live key in [0, KV_LEN), by naming one.

    Args:
        mask: the simplified mask.
        rows: the mask solved for keys.
    """
    proven: list[tuple[Node, tuple[Node, ...]]] = []
    for key in _witnesses(rows, algebra):
        conditions = _conditions(mask, key, algebra)
        if conditions is not None:
            proven.append((key, conditions))
        if key is not _Q_IDX and any(_cost(conditions) <= 1 for _, conditions in proven):
            break
    if not proven:
        return Proof(False, "no key was found that is live for every query")
    key, conditions = min(proven, key=lambda attempt: _cost(attempt[1]))
    given = f", given {' and '.join(expression_text(c) for c in conditions)}" if conditions else ""
    return Proof(True, f"kv_idx == {expression_text(key)} always passes the mask{given}", conditions)


def _witnesses(rows: RowSet, algebra: Algebra) -> Iterator[Node]:
    """Keys worth trying, the most telling first."""
    found = [_Q_IDX, ZERO]
    for segment in rows.segments:
        if segment.inner is not None and segment.inner.lo is not None:
            found.append(algebra.maximum(ZERO, segment.inner.lo))
        if segment.inner is not None and segment.inner.hi is not None:
            found.append(algebra.offset(segment.inner.hi, -1))
    found.append(algebra.offset(KV_LEN, -1))
    yield from list(dict.fromkeys(found))[:_MAX_WITNESSES]


def _conditions(mask: Node, key: Node, algebra: Algebra) -> tuple[Node, ...] | None:
    """What must hold of the launch for the key to exist and be live in every row; None if more than that.

    Liveness is only asked for where there are rows and keys: that the key exists says so already.
    """
    exists = algebra.conjunction(algebra.le(ZERO, key), algebra.lt(key, KV_LEN))
    occupied = Algebra(algebra.ranges.assuming({"Q_LEN": _SOME, "KV_LEN": _SOME}))
    live = occupied.rebuild(mask, {_KV_IDX: key})
    found = [_everywhere(exists, algebra), _everywhere(live, occupied)]
    conditions = [part for holds in reversed(found) if holds is not None for part in conjuncts(holds)]
    if None in found or not all(_is_launch_condition(part) for part in conditions):
        return None
    return tuple(dict.fromkeys(part for part in conditions if part is not TRUE))


def _everywhere(condition: Node, algebra: Algebra) -> Node | None:
    """The condition for all queries."""
    every_row = Box({_Q_IDX: (ZERO, algebra.offset(Q_LEN, -1))})
    found = BoxEvaluator(algebra, every_row).of(condition)
    return None if found is None else found.lo


def _cost(conditions: tuple[Node, ...]) -> int:
    """How much is asked of a launch: that there are keys at all, one thing, or things that must fit each other."""
    return sum(_condition_cost(condition) for condition in conditions)


def _condition_cost(condition: Node) -> int:
    leaves = {part for part in topological(condition) if part.op in ("input", "scalar")}
    if leaves == {KV_LEN}:
        return 0
    return 3 if len(leaves) > 1 and any(leaf.op == "scalar" for leaf in leaves) else 1


def _is_launch_condition(node: Node) -> bool:
    """A condition short enough to check at each launch, over lengths and scalars."""
    return (
        node is not FALSE
        and not node.axes
        and is_small(node, _MAX_CONDITION_SIZE)
        and all(part.op != "load" for part in topological(node))
    )


def prove_contiguous(rows: RowSet) -> Proof:
    """Prove that the live keys of every row are one interval."""
    if rows.is_nothing:
        return Proof(True, "no key is live")
    if not rows.is_exact:
        return Proof(False, rows.unsolved[0].why if rows.unsolved else "a row may have many separate intervals")
    if len(rows.segments) > 1:
        return Proof(False, f"a row may have {len(rows.segments)} separate intervals")
    return Proof(True, "the live keys of a row are one interval")
