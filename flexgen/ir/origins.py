"""Where IR nodes came from: a side table from nodes to the user's source, outside node equality."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from flexgen.errors import SourceSpan
from flexgen.ir.graph import Node


@dataclass(frozen=True, slots=True)
class Origin:
    """One place a node came from: the variable the user assigned it to, if any, and the source span, if known."""

    variable: str | None
    span: SourceSpan | None


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of the nodes of a pair of mods; a node may come from several lines (first one first)."""

    table: Mapping[Node, tuple[Origin, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, node: Node) -> tuple[Origin, ...]:
        return self.table.get(node, ())

    def variable(self, node: Node) -> str | None:
        """Return the first variable name the user gave this value."""
        return next((origin.variable for origin in self.of(node) if origin.variable), None)

    def span(self, node: Node) -> SourceSpan | None:
        return next((origin.span for origin in self.of(node) if origin.span), None)
