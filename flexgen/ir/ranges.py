"""The range of values that an integer node can take for any inputs; what the simplifier's integer rules rest on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexgen.ir.dtypes import integer_limits
from flexgen.ir.graph import INPUT_AXES, Node
from flexgen.ir.sizes import split_size_name

# Indices of the score tensor are never negative, and its lengths fit int32.
_LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """All integers from `low` to `high`, both included; bool counts as 0 and 1."""

    low: int
    high: int

    def within(self, other: Range) -> bool:
        return other.low <= self.low and self.high <= other.high


class Ranges:
    """Ranges of nodes, each computed once."""

    def __init__(self) -> None:
        self._known: dict[Node, Range | None] = {}

    def of(self, node: Node) -> Range | None:
        """Return the node's range, None if it is floating. Never recurses."""
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [arg for arg in current.args if arg not in self._known]
            if current not in self._known and not missing:
                self._known[current] = self._compute(current)
            if missing:
                stack.extend(missing)
            else:
                stack.pop()
        return self._known[node]

    def exact(self, node: Node) -> bool:
        """Whether an integer operation never wraps: its mathematical result always fits its dtype."""
        return self.of(node) is not None and self._unwrapped(node) is not None

    def is_non_negative(self, node: Node) -> bool:
        found = self.of(node)
        return found is not None and found.low >= 0

    def _compute(self, node: Node) -> Range | None:
        if node.dtype.is_floating_point:
            return None
        return self._unwrapped(node) or Range(*integer_limits(node.dtype))

    def _unwrapped(self, node: Node) -> Range | None:
        """Return the range by the op's rule, or None if there is no rule or the dtype cannot hold it."""
        if node.op in _LEAF_RANGES:
            found = _LEAF_RANGES[node.op](node)
        else:
            args = [self._known[arg] for arg in node.args]
            integers = [arg for arg in args if arg is not None]
            rule = _RANGES.get(node.op)
            found = rule(*integers) if rule is not None and len(integers) == len(args) else None
        fits = found is not None and found.within(Range(*integer_limits(node.dtype)))
        return found if fits else None


def _const(node: Node) -> Range | None:
    return Range(int(node.attr), int(node.attr)) if isinstance(node.attr, int) else None


def _hull(*values: int) -> Range:
    return Range(min(values), max(values))


def _mul(a: Range, b: Range) -> Range:
    return _hull(a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)


def _floordiv(a: Range, b: Range) -> Range | None:
    if b.low <= 0:
        return None
    return _hull(a.low // b.low, a.low // b.high, a.high // b.low, a.high // b.high)


def _mod(a: Range, b: Range) -> Range | None:
    if b.low <= 0:
        return None
    return Range(0, min(a.high, b.high - 1) if a.low >= 0 else b.high - 1)


def _if_non_negative(rule: Callable[[Range, Range], Range | None]) -> Callable[[Range, Range], Range | None]:
    """Toward zero and flooring are one where the dividend is not negative."""
    return lambda a, b: rule(a, b) if a.low >= 0 else None


def _and(a: Range, b: Range) -> Range | None:
    bounds = [arg.high for arg in (a, b) if arg.low >= 0]
    return Range(0, min(bounds)) if bounds else None


def _or(a: Range, b: Range) -> Range | None:
    if a.low < 0 or b.low < 0:
        return None
    return Range(0, (1 << max(a.high, b.high).bit_length()) - 1)


def _shr(a: Range, b: Range) -> Range | None:
    return Range(a.low >> b.low, a.high >> b.low) if b.low == b.high and 0 <= b.low < 64 else None


def _shl(a: Range, b: Range) -> Range | None:
    return Range(a.low << b.low, a.high << b.low) if b.low == b.high and 0 <= b.low < 64 else None


def _abs(a: Range) -> Range:
    return Range(0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high)), max(abs(a.low), abs(a.high)))


def _sign(a: Range) -> Range:
    return Range((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0))


_LEAF_RANGES: dict[str, Callable[[Node], Range | None]] = {
    "input": lambda node: Range(0, _LARGEST_INDEX) if node.attr in INPUT_AXES else None,
    "const": _const,
    "scalar": lambda node: Range(0, integer_limits(node.dtype)[1]) if split_size_name(node.attr) else None,
    "load": lambda node: None,
}

_RANGES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: Range(a.low + b.low, a.high + b.high),
    "sub": lambda a, b: Range(a.low - b.high, a.high - b.low),
    "mul": _mul,
    "floordiv": _floordiv,
    "truncdiv": _if_non_negative(_floordiv),
    "mod": _mod,
    "fmod": _if_non_negative(_mod),
    "neg": lambda a: Range(-a.high, -a.low),
    "abs": _abs,
    "sign": _sign,
    "min": lambda a, b: Range(min(a.low, b.low), min(a.high, b.high)),
    "max": lambda a, b: Range(max(a.low, b.low), max(a.high, b.high)),
    "and": _and,
    "or": _or,
    "xor": _or,
    "shl": _shl,
    "shr": _shr,
    "where": lambda condition, a, b: _hull(a.low, a.high, b.low, b.high),
    "cast": lambda a: a,
}
