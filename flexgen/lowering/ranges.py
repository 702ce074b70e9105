"""Numeric value ranges of integer and bool expressions: one interval rule an op.

The printers ask it whether int64 code may be narrowed to int32, whether a dividend is non-negative, and whether a
load index can be negative. A rule never assumes that arithmetic does not wrap: a result that may leave its dtype
has the dtype's whole range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch

from flexgen.ir.graph import Node


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from lo to hi, both included; None is unbounded. False is 0 and True is 1."""

    lo: int | None = None
    hi: int | None = None

    def __post_init__(self) -> None:
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            raise ValueError(f"empty range [{self.lo}, {self.hi}]")

    @classmethod
    def exactly(cls, value: int) -> Range:
        return cls(int(value), int(value))

    def contains(self, other: Range) -> bool:
        above = self.lo is None or (other.lo is not None and other.lo >= self.lo)
        return above and (self.hi is None or (other.hi is not None and other.hi <= self.hi))

    @property
    def is_exact(self) -> bool:
        return self.lo is not None and self.lo == self.hi

    @property
    def is_finite(self) -> bool:
        return self.lo is not None and self.hi is not None

    @property
    def non_negative(self) -> bool:
        return self.lo is not None and self.lo >= 0

    @property
    def positive(self) -> bool:
        return self.lo is not None and self.lo >= 1


UNKNOWN = Range()
BOOL = Range(0, 1)
TRUE = Range(1, 1)
FALSE = Range(0, 0)

# No sequence, batch or head count reaches 2**31; every length and index of an attention problem lies in here.
INDEX = Range(0, 2**31 - 1)
# A tensor's size is also bounded by the address space, which leaves room for sums of a few of them.
SIZE = Range(0, 2**62)

_INDEX_INPUTS = ("b", "h", "q_idx", "kv_idx", "Q_LEN", "KV_LEN", "q_lo", "q_hi", "kv_lo", "kv_hi", "h_lo", "h_hi")
DEFAULT_INPUTS: Mapping[str, Range] = MappingProxyType(dict.fromkeys(_INDEX_INPUTS, INDEX))


@cache
def dtype_range(dtype: torch.dtype) -> Range:
    """Return the range that a dtype holds; unknown for floating dtypes."""
    if dtype == torch.bool:
        return BOOL
    if dtype.is_floating_point or dtype.is_complex:
        return UNKNOWN
    info = torch.iinfo(dtype)
    return Range(info.min, info.max)


class RangeAnalysis:
    """Ranges of expressions under assumptions about inputs, scalars and buffers.

    Args:
        inputs: ranges by name of an input, scalar or buffer (the range of its elements), or by node; they are
            added to `DEFAULT_INPUTS`.
    """

    def __init__(self, inputs: Mapping[str | Node, Range] | None = None) -> None:
        self._assumed: dict[str | Node, Range] = dict(DEFAULT_INPUTS.items())
        self._assumed.update(inputs or {})
        self._exact: dict[Node, Range] = {}
        self._known: dict[Node, Range] = {}

    def assuming(self, more: Mapping[str | Node, Range]) -> RangeAnalysis:
        """Return an analysis under further assumptions."""
        return RangeAnalysis({**self._assumed, **more})

    def learn(self, name: str, found: Range) -> None:
        """Assume a range of an input that has not been asked about yet."""
        self._assumed[name] = found

    def of(self, node: Node) -> Range:
        """Return the range of the node's value; UNKNOWN for floating nodes."""
        self._compute(node)
        return self._known[node]

    def may_wrap(self, node: Node) -> bool:
        """Return whether the node's own operation may leave its dtype (false where its operands are unbounded:
        an unbounded operand is an int64 of which nothing is known)."""
        self._compute(node)
        return not dtype_range(node.dtype).contains(_finite(self._exact[node], dtype_range(node.dtype)))

    def _compute(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [arg for arg in node.args if arg not in self._known] if node not in self._known else []
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if node not in self._known:
                self._exact[node] = self._rule(node)
                self._known[node] = _fit(self._exact[node], node.dtype)

    def _rule(self, node: Node) -> Range:
        assumed = self._assumed.get(node)
        if assumed is not None:
            return assumed
        if node.op in LEAF_OPS:
            return self._leaf(node)
        if node.op in UNKNOWN_OPS or (node.dtype.is_floating_point and node.op != "cast"):
            return dtype_range(node.dtype)
        return RULES[node.op](node, *(self._known[arg] for arg in node.args))

    def _leaf(self, node: Node) -> Range:
        if node.op == "const":
            return UNKNOWN if isinstance(node.attr, float) else Range.exactly(int(node.attr or 0))
        assumed = self._assumed.get(str(node.attr))
        if assumed is not None:
            return assumed
        if node.op == "scalar" and ".size(" in str(node.attr):
            return SIZE
        return UNKNOWN if node.dtype == torch.int64 else dtype_range(node.dtype)


def value_range(node: Node, assume: Mapping[str | Node, Range] | None = None) -> Range:
    """Return the range of one node; use a `RangeAnalysis` for several."""
    return RangeAnalysis(assume).of(node)


def _finite(found: Range, held: Range) -> Range:
    return Range(held.lo if found.lo is None else found.lo, held.hi if found.hi is None else found.hi)


def _fit(found: Range, dtype: torch.dtype) -> Range:
    """Give up on a result that may wrap; let an int64 stay unbounded, as its ends say nothing useful."""
    if dtype.is_floating_point:
        return UNKNOWN
    held = dtype_range(dtype)
    if held.contains(_finite(found, held)):
        return found if dtype == torch.int64 else _finite(found, held)
    return UNKNOWN if dtype == torch.int64 else held


# Rules compute with infinities, so that None needs no case of its own.
_Bound = int | float
Rule = Callable[..., Range]


def _lo(found: Range) -> _Bound:
    return -math.inf if found.lo is None else found.lo


def _hi(found: Range) -> _Bound:
    return math.inf if found.hi is None else found.hi


def _range(lo: _Bound, hi: _Bound) -> Range:
    return Range(None if math.isinf(lo) else int(lo), None if math.isinf(hi) else int(hi))


def _hull(values: list[_Bound]) -> Range:
    return _range(min(values), max(values))


def _corners(a: Range, b: Range) -> list[tuple[_Bound, _Bound]]:
    return [(x, y) for x in (_lo(a), _hi(a)) for y in (_lo(b), _hi(b))]


def _add(_node: Node, a: Range, b: Range) -> Range:
    return _range(_lo(a) + _lo(b), _hi(a) + _hi(b))


def _neg(_node: Node, a: Range) -> Range:
    return _range(-_hi(a), -_lo(a))


def _sub(node: Node, a: Range, b: Range) -> Range:
    if node.args[0] is node.args[1]:
        return Range.exactly(0)
    return _add(node, a, _neg(node, b))


def _times(x: _Bound, y: _Bound) -> _Bound:
    return 0 if x == 0 or y == 0 else x * y


def _mul(node: Node, a: Range, b: Range) -> Range:
    found = _hull([_times(x, y) for x, y in _corners(a, b)])
    return _range(max(_lo(found), 0), _hi(found)) if node.args[0] is node.args[1] else found


def _floor_quotient(x: _Bound, y: _Bound) -> _Bound:
    """Floor of x / y for y >= 1, with either infinite."""
    if math.isinf(x):
        return x
    if math.isinf(y):
        return 0 if x >= 0 else -1
    return int(x) // int(y)


def _trunc_quotient(x: _Bound, y: _Bound) -> _Bound:
    return _floor_quotient(x, y) if x >= 0 else -_floor_quotient(-x, y)


def _quotient(quotient: Callable[[_Bound, _Bound], _Bound]) -> Rule:
    def rule(node: Node, a: Range, b: Range) -> Range:
        if b.hi is not None and b.hi <= -1:
            return rule(node, _neg(node, a), _neg(node, b))
        if not b.positive:
            return UNKNOWN
        return _hull([quotient(x, y) for x, y in _corners(a, b)])

    return rule


def _mod(_node: Node, a: Range, b: Range) -> Range:
    if b.positive:
        inside = a.non_negative and _hi(a) < _lo(b)
        return a if inside else _range(0, min(_hi(b) - 1, _hi(a)) if a.non_negative else _hi(b) - 1)
    if b.hi is not None and b.hi <= -1:
        return _range(_lo(b) + 1, 0)
    return UNKNOWN


def _fmod(_node: Node, a: Range, b: Range) -> Range:
    limit = max(abs(_lo(b)), abs(_hi(b))) - 1
    if _lo(b) <= 0 <= _hi(b):
        return UNKNOWN
    lo = 0 if a.non_negative else max(_lo(a), -limit)
    return _range(lo, max(0, min(_hi(a), limit)))


def _abs(_node: Node, a: Range) -> Range:
    ends = [abs(_lo(a)), abs(_hi(a))]
    return _range(0 if _lo(a) <= 0 <= _hi(a) else min(ends), max(ends))


def _sign(_node: Node, a: Range) -> Range:
    return _range((_lo(a) > 0) - (_lo(a) < 0), (_hi(a) > 0) - (_hi(a) < 0))


def _min(_node: Node, a: Range, b: Range) -> Range:
    return _range(min(_lo(a), _lo(b)), min(_hi(a), _hi(b)))


def _max(_node: Node, a: Range, b: Range) -> Range:
    return _range(max(_lo(a), _lo(b)), max(_hi(a), _hi(b)))


def _truth(always: bool, never: bool) -> Range:
    return TRUE if always else FALSE if never else BOOL


def _is_floating(node: Node) -> bool:
    return node.args[0].dtype.is_floating_point


def _lt(node: Node, a: Range, b: Range) -> Range:
    if node.args[0] is node.args[1]:
        return FALSE
    return BOOL if _is_floating(node) else _truth(_hi(a) < _lo(b), _lo(a) >= _hi(b))


def _le(node: Node, a: Range, b: Range) -> Range:
    if _is_floating(node):
        return BOOL
    return _truth(_hi(a) <= _lo(b) or node.args[0] is node.args[1], _lo(a) > _hi(b))


def _eq(node: Node, a: Range, b: Range) -> Range:
    if _is_floating(node):
        return BOOL
    always = node.args[0] is node.args[1] or (a.is_exact and a == b)
    return _truth(always, _hi(a) < _lo(b) or _hi(b) < _lo(a))


def _not(node: Node, a: Range) -> Range:
    return _range(1 - _hi(a), 1 - _lo(a)) if node.dtype == torch.bool else _range(-1 - _hi(a), -1 - _lo(a))


def _ne(node: Node, a: Range, b: Range) -> Range:
    equal = _eq(node, a, b)
    return _range(1 - _hi(equal), 1 - _lo(equal))


def _and(_node: Node, a: Range, b: Range) -> Range:
    tops = [_hi(found) for found in (a, b) if found.non_negative]
    both_true = a == TRUE and b == TRUE
    return _range(1 if both_true else 0, min(tops)) if tops else UNKNOWN


def _all_ones(hi: _Bound) -> _Bound:
    return hi if math.isinf(hi) else (1 << int(hi).bit_length()) - 1


def _or(_node: Node, a: Range, b: Range) -> Range:
    if not (a.non_negative and b.non_negative):
        return UNKNOWN
    return _range(max(_lo(a), _lo(b)), _all_ones(max(_hi(a), _hi(b))))


def _xor(node: Node, a: Range, b: Range) -> Range:
    if a.is_exact and b.is_exact:
        return Range.exactly((a.lo or 0) ^ (b.lo or 0))
    if node.args[0] is node.args[1]:
        return Range.exactly(0)
    return _range(0, _all_ones(max(_hi(a), _hi(b)))) if a.non_negative and b.non_negative else UNKNOWN


def _shl(node: Node, a: Range, b: Range) -> Range:
    if not Range(0, 62).contains(b):
        return UNKNOWN
    return _mul(node, a, Range(1 << (b.lo or 0), 1 << (b.hi or 0)))


def _shr(_node: Node, a: Range, b: Range) -> Range:
    if not Range(0, 63).contains(b):
        return UNKNOWN
    return _hull([_floor_quotient(x, 1 << int(y)) for x, y in _corners(a, b)])


def _where(_node: Node, condition: Range, a: Range, b: Range) -> Range:
    if condition.is_exact:
        return a if condition == TRUE else b
    return _range(min(_lo(a), _lo(b)), max(_hi(a), _hi(b)))


def _cast(node: Node, a: Range) -> Range:
    if _is_floating(node):
        return dtype_range(node.dtype) if node.dtype != torch.int64 else UNKNOWN
    if node.dtype == torch.bool:
        return _truth(not a.contains(FALSE), a == FALSE)
    return a if node.dtype == torch.int64 else _finite(a, dtype_range(node.args[0].dtype))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "add": _add,
        "sub": _sub,
        "mul": _mul,
        "floordiv": _quotient(_floor_quotient),
        "truncdiv": _quotient(_trunc_quotient),
        "mod": _mod,
        "fmod": _fmod,
        "neg": _neg,
        "abs": _abs,
        "sign": _sign,
        "min": _min,
        "max": _max,
        "eq": _eq,
        "ne": _ne,
        "lt": _lt,
        "le": _le,
        "gt": lambda node, a, b: _lt(node, b, a),
        "ge": lambda node, a, b: _le(node, b, a),
        "and": _and,
        "or": _or,
        "xor": _xor,
        "not": _not,
        "shl": _shl,
        "shr": _shr,
        "where": _where,
        "cast": _cast,
    }
)

LEAF_OPS = frozenset({"input", "const", "scalar", "load"})

# These yield floating numbers only, of which ranges are not tracked.
UNKNOWN_OPS = frozenset(
    {
        *("div", "pow", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2", "log1p"),
        *("sin", "cos", "tanh", "sigmoid", "erf", "floor", "ceil", "trunc", "round"),
    }
)
