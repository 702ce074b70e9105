"""Traced tensors as indexed values: a shape, and a function from index nodes to the node of that element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flexgen.errors import FlexgenError
from flexgen.ir.graph import Node, const

Indices = tuple[Node, ...]
Element = Callable[[Indices], Node]

MAX_TERMS = 64  # of an unrolled reduction, and of a table of constants that is looked up
_MAX_DEPTH = 100  # of pending operations on a tensor that is not 0-d; element functions nest this deep


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: its size at capture and, if it is a captured tensor's own, which one (sizes of it may change)."""

    size: int
    source: tuple[str, int] | None = None


class Refused(Exception):
    """An operation cannot be compiled; carries the located error. Tracing continues with a placeholder."""

    def __init__(self, error: FlexgenError) -> None:
        self.error = error
        super().__init__(error.what)


@dataclass(slots=True, eq=False)
class Value:
    """A traced tensor.

    Attributes:
        dims: its dimensions; () for a 0-d one.
        dtype: element dtype.
        element: the node of the element at the given indices, each in [0, size).
        depth: how many element functions are nested in `element`.
        captured: the buffer that this value is a view of, if its elements are plain loads.
    """

    dims: tuple[Dim, ...]
    dtype: torch.dtype
    element: Element
    depth: int = 0
    captured: str | None = None
    _known: dict[Indices, Node] = field(default_factory=dict, repr=False)

    def at(self, indices: Indices) -> Node:
        found = self._known.get(indices)
        if found is None:
            found = self._known[indices] = self.element(indices)
        return found

    @property
    def node(self) -> Node:
        """The node of a 0-d value."""
        return self.at(())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)


def scalar_value(node: Node) -> Value:
    return Value((), node.dtype, lambda _: node)


def filled(shape: Sequence[int], value: int | float | bool, dtype: torch.dtype) -> Value:
    node = const(value, dtype)
    return Value(tuple(Dim(size) for size in shape), dtype, lambda _: node)


def is_too_deep(depth: int) -> bool:
    """Whether element functions nest so deep that evaluating one could exhaust Python's stack."""
    return depth > _MAX_DEPTH
