"""What a command tells of its subject's sequence sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexgen.commands.subject import Subject
from flexgen.distributed.assignment import NAMES
from flexgen.distributed.explain import explain_plan
from flexgen.distributed.plan import choose_plan
from flexgen.distributed.planning import plan_context_parallel
from flexgen.errors import OptionError
from flexgen.lowered import Lowered
from flexgen.work import matrix_rate


def context_reports(subject: Subject, lowered: Lowered, ranks: Sequence[int]) -> Iterator[str]:
    """Yield the report for each number of ranks.

    Raises:
        OptionError: sequences are packed, or weights are dropped.
        UnsupportedProblemError: the sequence cannot be cut in equal chunks.
    """
    for name, given in (("--packed", subject.packed), ("--dropout", subject.dropout_p)):
        if ranks and given:
            raise OptionError(
                f"--ranks was given with {name}",
                why="flexgen.context_parallel takes neither packed sequences nor dropout",
                fix=f"leave out {name}",
            )
    query, key, value = subject.tensors("meta")
    chip = lowered.plan.target.chip
    rate = matrix_rate(lowered.plan, chip) if chip is not None else None
    for number in ranks:
        plans = [
            plan_context_parallel(subject.attention, query, key, value, ranks=number, assignment=name) for name in NAMES
        ]
        chosen = choose_plan(plans)
        others = [plan for plan in plans if plan.assignment != chosen.assignment]
        yield explain_plan(chosen, others, subject.shape, rate)
