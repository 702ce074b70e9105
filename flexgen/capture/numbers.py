"""Captured numbers that may change: torch SymInt and SymFloat whose node is an IR expression over named scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexgen.ir.graph import Node, const, make


class NeedsConstant(Exception):
    """The mod uses scalars where Python, or the shape of a tensor, needs a plain number; tracing starts again.

    Args:
        names: the scalars that must be constants.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        super().__init__(", ".join(sorted(names)))


@dataclass(frozen=True, slots=True)
class NumberNode:
    """What torch calls a SymNode: an expression over captured scalars, and its value at capture.

    torch reads it through the duck-typed protocol below. Whatever would need the value itself (`range`, `if`, `int`,
    a tensor's shape) raises `NeedsConstant`, so a value can never be baked in unseen.

    Attributes:
        expr: int64 or float64 (bool for a comparison) expression in the IR.
        hint: its value for the numbers that are captured now.
        names: the scalars it depends on.
    """

    expr: Node
    hint: int | float | bool
    names: frozenset[str]

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def wrap_int(self, value: int) -> NumberNode:
        return NumberNode(const(value, torch.int64), value, frozenset())

    def wrap_float(self, value: float) -> NumberNode:
        return NumberNode(const(value, torch.float64), value, frozenset())

    def wrap_bool(self, value: bool) -> NumberNode:
        return NumberNode(const(value, torch.bool), value, frozenset())

    def add(self, other: NumberNode) -> NumberNode:
        return _arithmetic("add", self, other, lambda x, y: x + y)

    def sub(self, other: NumberNode) -> NumberNode:
        return _arithmetic("sub", self, other, lambda x, y: x - y)

    def mul(self, other: NumberNode) -> NumberNode:
        return _arithmetic("mul", self, other, lambda x, y: x * y)

    def mod(self, other: NumberNode) -> NumberNode:
        return _arithmetic("mod", self, other, lambda x, y: x % y)

    def int_floordiv(self, other: NumberNode) -> NumberNode:
        return _arithmetic("floordiv", self, other, lambda x, y: x // y)

    def int_truediv(self, other: NumberNode) -> NumberNode:
        return self.sym_float().float_truediv(other.sym_float())

    def float_truediv(self, other: NumberNode) -> NumberNode:
        return _arithmetic("div", self, other, lambda x, y: x / y)

    def sym_min(self, other: NumberNode) -> NumberNode:
        return _arithmetic("min", self, other, min)

    def sym_max(self, other: NumberNode) -> NumberNode:
        return _arithmetic("max", self, other, max)

    def neg(self) -> NumberNode:
        return NumberNode(make("neg", self.expr, dtype=self.expr.dtype), -self.hint, self.names)

    def sym_float(self) -> NumberNode:
        if self.is_float():
            return self
        return NumberNode(make("cast", self.expr, dtype=torch.float64), float(self.hint), self.names)

    def __getattr__(self, name: str) -> Callable[..., object]:
        """Answer every other query (`guard_int`, `bool_`, `pow`, ...) by asking for a constant."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: _needs_constant(self, *args)


def _needs_constant(*nodes: object) -> object:
    raise NeedsConstant(frozenset().union(*(node.names for node in nodes if isinstance(node, NumberNode))))


def _arithmetic(
    op: str, left: NumberNode, right: NumberNode, compute: Callable[[int | float, int | float], int | float]
) -> NumberNode:
    if left.is_bool() or right.is_bool():
        _needs_constant(left, right)
    if left.is_float() or right.is_float():
        left, right = left.sym_float(), right.sym_float()
    expr = make(op, left.expr, right.expr, dtype=left.expr.dtype)
    try:
        hint = compute(left.hint, right.hint)
    except ZeroDivisionError:
        hint = math.nan if left.is_float() else 0  # as in the mod with a constant, it fails or not when it runs
    return NumberNode(expr, hint, left.names | right.names)


def symbolic(name: str, value: int | float) -> torch.SymInt | torch.SymFloat:
    """Return a number that torch traces as the run-time scalar `name` (int64 or float64)."""
    dtype = torch.int64 if type(value) is int else torch.float64
    node = NumberNode(make("scalar", attr=name, dtype=dtype), value, frozenset({name}))
    wrap = torch.SymInt if type(value) is int else torch.SymFloat
    return wrap(node)


def number_node(value: object) -> NumberNode | None:
    """Return the node of a number made by `symbolic`, or computed from one."""
    node = getattr(value, "node", None) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else None
    return node if isinstance(node, NumberNode) else None
