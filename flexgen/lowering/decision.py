"""A decision: a template variable's value, why it was chosen, and what was rejected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative that was considered and why it lost."""

    value: object
    because: str


@dataclass(frozen=True, slots=True)
class Decision:
    """One template variable."""

    name: str
    value: object
    because: str
    rejected: tuple[Rejected, ...] = ()
