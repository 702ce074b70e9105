"""Counts of what was tried, so that a run says what it covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexgen.attention import Attention
from flexgen.fuzzing.reference import Problem


@dataclass(slots=True)
class Tally:
    """What a run covered; adds up over processes.

    Attributes:
        cases: drawn cases that ran to their end.
        forward, backward: calls whose outputs, and whose gradients, were compared with float64, those computed in
            another way included.
        excused: results that errors of rounding may move as far as they were off.
        repeated: cases that failed as earlier ones did.
        refused: cases that flexgen refused, by the error.
        tiers, dtypes, ways, ops: of calls: how the mask was understood, the inputs' dtypes, other ways of computing,
            and the ops of the IR in the mods.
    """

    cases: int = 0
    forward: int = 0
    backward: int = 0
    excused: int = 0
    repeated: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)

    def count_call(self, attention: Attention, problem: Problem, ways: Sequence[str], excused: int) -> None:
        """Count a call that was right."""
        runs = 1 + len(ways)
        self.forward += runs
        self.backward += runs * problem.backward
        self.excused += excused
        self.dtypes[str(problem.query.dtype).removeprefix("torch.")] += runs
        self.ways.update(ways)
        for understood in attention.understood:
            self.tiers[understood.facts.tier.value if understood.mods.mask else "no mask"] += runs
            for graph in understood.mods.graphs():
                self.ops.update({node.op for node in graph.nodes()})

    def add(self, other: Tally) -> None:
        """Add what another process counted."""
        self.cases += other.cases
        self.forward += other.forward
        self.backward += other.backward
        self.excused += other.excused
        self.repeated += other.repeated
        for name in ("refused", "tiers", "dtypes", "ways", "ops"):
            getattr(self, name).update(getattr(other, name))
