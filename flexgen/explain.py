"""The decision report: what was proven about the mods, and each template variable with its reason."""

from __future__ import annotations

import textwrap

from flexgen.explain_score import score_facts
from flexgen.ir.simplify import Simplified
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.decision import Decision
from flexgen.lowering.facts import MaskFacts
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.plans import AnyBackwardPlan, WalkPlan
from flexgen.lowering.triton.plan import ForwardPlan

_WIDTH = 100
_BECAUSE = 42  # the column at which reasons begin, past the longest names and usual values


def explain(plan: ForwardPlan, facts: MaskFacts, simplified: Simplified, rule: BlockRule | None = None) -> str:
    """Return the report of a forward plan as text.

    Args:
        rule: of the blocks that its table lists, where it walks a derived one.
    """
    sections = [
        f"forward kernel for {plan.target.name}",
        "facts\n" + textwrap.indent("\n".join([facts.describe(), *_score(simplified, plan)]), "  "),
        "schedule\n" + textwrap.indent(_schedule(plan), "  "),
        "decisions\n" + "\n".join(line for decision in plan.decisions for line in _decision(decision)),
    ]
    if rule is not None:
        lines = (f"  {label:<9} {text}" for label, text in rule.describe())
        sections.insert(3, "blocks of the table\n" + "\n".join(lines))
    if simplified.fired:
        rules = ", ".join(f"{name} x{count}" for name, count in simplified.fired)
        sections.insert(1, f"simplified by\n  {rules}")
    return "\n\n".join(sections) + "\n"


def explain_backward(name: str, plan: AnyBackwardPlan | GluonBackwardPlan) -> str:
    """Return the report of one backward kernel as text."""
    sections = [
        f"{name} kernel for {plan.target.name}",
        "schedule\n" + textwrap.indent(_schedule(plan), "  "),
        "decisions\n" + "\n".join(line for decision in plan.decisions for line in _decision(decision)),
    ]
    return "\n\n".join(sections) + "\n"


def _score(simplified: Simplified, plan: WalkPlan) -> list[str]:
    return [f"{label:<18} {text}" for label, text in score_facts(simplified.mods.score, plan.query_dtype)]


def _schedule(plan: WalkPlan | GluonBackwardPlan) -> str:
    schedule = plan.schedule
    return "\n".join([f"{schedule.walk.value}: {schedule.because}", *(s.because for s in schedule.segments)])


def _decision(decision: Decision) -> list[str]:
    head = f"  {decision.name:<22} = {value_text(decision.value)}"
    word = f"{head:<{_BECAUSE}} because: "
    because = textwrap.wrap(decision.because, _WIDTH - len(word), break_long_words=False)
    lines = [word + (because[0] if because else "")]
    lines += [" " * len(word) + more for more in because[1:]]
    lines += [f"{'':<28}rejected {rejected.value}: {rejected.because}" for rejected in decision.rejected]
    return lines


def value_text(value: object) -> str:
    """Return a decision's value as reports show it."""
    if value is None:
        return "-"
    packed = getattr(value, "packed_heads", None)
    if packed is not None:
        return f"{packed} head{'s' if packed > 1 else ''} a tile"
    return str(value)
