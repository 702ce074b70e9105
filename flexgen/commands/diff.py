"""What options change: the decisions that differ, and then the emitted texts, line by line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from flexgen.commands.console import Console, Span, Style, wrapped
from flexgen.commands.subject import Subject
from flexgen.commands.sweep import settings_text
from flexgen.explain import value_text
from flexgen.lowered import Lowered
from flexgen.lowering.decision import Decision
from flexgen.lowering.plans import RowPlan
from flexgen.tuning.settings import Settings

_STYLES: dict[str, Style] = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True, slots=True)
class Change:
    """One decision that differs; None where only the other lowering makes it."""

    kernel: str
    before: Decision | None
    after: Decision | None


def write_diff(subject: Subject, target: str, settings: Settings, backward: bool, console: Console) -> None:
    """Lower with and without the settings, and write what differs."""
    before = subject.lower(target, backward=backward)
    after = subject.having(settings).lower(target, backward=backward)
    name = settings_text(settings)
    changes = list(changed_decisions(before, after))
    lines = list(diff_lines(before.source, after.source, name))
    if not changes and not lines:
        console.line(f"{name} changes nothing for {target}: flexgen decides the same by itself")
        return
    console.line(Span(f"decisions changed by {name}, for {target}", "bold"))
    for change in changes:
        _write_change(change, console)
    if not changes:
        console.line("  none")
    console.line()
    if not lines:
        console.line("the emitted text is the same")
    for line in lines:
        console.line(_painted(line))


def changed_decisions(before: Lowered, after: Lowered) -> Iterator[Change]:
    """Yield the decisions whose value or reason differs, those with another value first, by kernel."""
    for kernel in dict.fromkeys((*before.entries, *after.entries)):
        old, new = _decisions(before, kernel), _decisions(after, kernel)
        changes = [Change(kernel, old.get(name), new.get(name)) for name in dict.fromkeys((*old, *new))]
        changes = [change for change in changes if not _same(change)]
        yield from sorted(changes, key=lambda change: _value(change.before) == _value(change.after))


def _decisions(lowered: Lowered, kernel: str) -> dict[str, Decision]:
    if kernel not in lowered.entries:
        return {}
    plan = lowered.plan_of(kernel)
    return {} if isinstance(plan, RowPlan) else {decision.name: decision for decision in plan.decisions}


def _same(change: Change) -> bool:
    before, after = change.before, change.after
    if before is None or after is None:
        return _value(before) == _value(after)
    return (before.value, before.because) == (after.value, after.because)


def _value(decision: Decision | None) -> str:
    return value_text(decision.value if decision else None)


def _write_change(change: Change, console: Console) -> None:
    decision = change.after or change.before
    assert decision is not None
    old, new = _value(change.before), _value(change.after)
    values = f"{old} -> {new}" if old != new else f"{new}, as before"
    because = decision.because if change.after else "not decided any more"
    kernel = "" if change.kernel == "forward" else f"{change.kernel}: "
    first, *more = wrapped(f"  {kernel + decision.name:<24} {values:<22} because: {because}")
    style: Style = "" if old != new else "dim"
    for line in (first, *more):
        console.line(Span(line, style))


def diff_lines(before: dict[str, str], after: dict[str, str], name: str) -> Iterator[str]:
    """Yield a unified diff of each emitted text that differs."""
    for kernel in dict.fromkeys((*before, *after)):
        old, new = before.get(kernel, ""), after.get(kernel, "")
        names = (f"{kernel}.py", f"{kernel}.py  {name}")
        yield from difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="")


def _painted(line: str) -> Span:
    if line.startswith(("--- ", "+++ ")):
        return Span(line, "bold")
    return Span(line, _STYLES.get(line[:1], ""))
