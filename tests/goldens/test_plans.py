"""Every decision about one plain problem, and for each variation of it the decisions that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flexgen.errors import FlexgenError
from flexgen.lowering.decision import Decision
from tests.goldens.plans import CASES, REFUSED, PlanCase

BASE, *VARIATIONS = CASES


def test_base(golden: Callable[[str, str], None]) -> None:
    golden(f"plans/{BASE.name}.txt", BASE.lower().explain())


@pytest.mark.parametrize("case", VARIATIONS, ids=lambda case: case.name)
def test_variation(case: PlanCase, golden: Callable[[str, str], None]) -> None:
    usual = {decision.name: decision for decision in BASE.lower().plan.decisions}
    changed = [decision for decision in case.lower().plan.decisions if decision != usual.get(decision.name)]
    golden(f"plans/{case.name}.txt", "".join(f"{line}\n" for decision in changed for line in decision_lines(decision)))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refusal(case: PlanCase, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(FlexgenError) as raised:
        case.lower()
    golden(f"plans/refused/{case.name}.txt", f"{type(raised.value).__name__}: {raised.value}\n")


def decision_lines(decision: Decision) -> Iterator[str]:
    yield f"{decision.name} = {decision.value}"
    yield f"    because {decision.because}"
    for rejected in decision.rejected:
        yield f"    not {rejected.value}: {rejected.because}"
