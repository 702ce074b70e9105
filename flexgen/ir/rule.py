"""What a rule of the simplifier is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexgen.ir.graph import Node
from flexgen.ir.ops import OPS, OpKind
from flexgen.ir.ranges import Ranges

COMPARISONS = frozenset(row.name for row in OPS.values() if row.kind is OpKind.COMPARE)


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to rewrite a node.

    Attributes:
        name: what a dump says fired; several rules may share it.
        ops: the ops of the nodes it may rewrite.
        rewrite: returns the replacement, or None where the rule does not apply.
        text: the identity `pattern -> replacement`; None for a rule that computes.
    """

    name: str
    ops: frozenset[str]
    rewrite: Callable[[Node, Ranges], Node | None]
    text: str | None = None
