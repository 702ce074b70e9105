"""Smart constructors of index expressions: constants fold, sums are canonical, what ranges decide is decided."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from flexgen.ir.folding import folded
from flexgen.ir.graph import Node, const, input_node, make, topological
from flexgen.lowering.affine import Linear
from flexgen.lowering.ranges import Range, RangeAnalysis, dtype_range

INDEX_DTYPE = torch.int64
TRUE = const(True, torch.bool)
FALSE = const(False, torch.bool)
ZERO = const(0, INDEX_DTYPE)
Q_LEN = input_node("Q_LEN")
KV_LEN = input_node("KV_LEN")

_PROOF_STEPS = 40
_MAX_COMPARED = 6
_INT64 = dtype_range(INDEX_DTYPE)


def number(value: int) -> Node:
    return const(value, INDEX_DTYPE)


def is_small(node: Node, limit: int) -> bool:
    """Return whether the expression has at most `limit` distinct nodes."""
    return sum(1 for _ in itertools.islice(topological(node), limit + 1)) <= limit


def is_integer(node: Node) -> bool:
    return not (node.dtype.is_floating_point or node.dtype.is_complex or node.dtype == torch.bool)


class Algebra:
    """Builds simplified int64 and bool nodes, given the ranges of what they are made of.

    Only arithmetic that provably does not wrap is taken apart; anything else stays the user's own expression.
    """

    def __init__(self, ranges: RangeAnalysis | None = None) -> None:
        self.ranges = ranges or RangeAnalysis()
        self._linear: dict[Node, Linear] = {}
        self._lower_bounds: dict[tuple[int, frozenset[tuple[Node, int]]], int | None] = {}

    # Sums.

    def linear(self, node: Node) -> Linear:
        """Take an integer node apart into a linear combination of atoms."""
        for part in topological(node) if node not in self._linear else ():
            if part not in self._linear and is_integer(part):
                self._linear[part] = self._take_apart(part)
        return self._linear[node]

    def _take_apart(self, node: Node) -> Linear:
        if node.op == "const":
            return Linear(constant=int(node.attr or 0))
        if not self.ranges.may_wrap(node):
            found = self._combine(node)
            if found is not None:
                return found
        return Linear.of([(_as_index(node), 1)])

    def _combine(self, node: Node) -> Linear | None:
        parts = [self._linear[arg] for arg in node.args if is_integer(arg)]
        match node.op:
            case "add":
                return self.cancel_mods(parts[0] + parts[1])
            case "sub":
                return self.cancel_mods(parts[0] - parts[1])
            case "neg":
                return parts[0].scaled(-1)
            case "mul" if parts[1].is_constant and self.ranges.of(node).is_finite:
                return parts[0].scaled(parts[1].constant)
            case "mul" if parts[0].is_constant and self.ranges.of(node).is_finite:
                return parts[1].scaled(parts[0].constant)
            case "shl" if parts[1].is_constant and self.ranges.of(node).is_finite:
                return parts[0].scaled(1 << parts[1].constant)
            case "cast" if parts:
                return parts[0]
        return None

    def cancel_mods(self, total: Linear) -> Linear:
        """Rewrite x - x % m as m * (x // m), and m * (x // m) + x % m as x."""
        for atom, coefficient in total:
            divisor = int(atom.args[1].attr or 0) if atom.op == "mod" and atom.args[1].op == "const" else 0
            if divisor <= 0:
                continue
            dividend = self.linear(atom.args[0])
            blocks = self.floordiv(dividend, divisor)
            without = total.without(atom)
            rewritten = without + (dividend - blocks.scaled(divisor)).scaled(coefficient)
            if len(rewritten.terms) < len(total.terms):
                return self.cancel_mods(rewritten)
        return total

    def build(self, total: Linear) -> Node:
        """Return the sum as a node: positive terms first, then what is subtracted, then the constant."""
        positive = [(atom, c) for atom, c in total if c > 0]
        negative = [(atom, -c) for atom, c in total if c < 0]
        if not positive:
            return self._subtract_all(number(total.constant), negative)
        result = _times(*positive[0])
        for atom, c in positive[1:]:
            result = _make("add", result, _times(atom, c))
        return _offset(self._subtract_all(result, negative), total.constant)

    def _subtract_all(self, start: Node, terms: Sequence[tuple[Node, int]]) -> Node:
        for atom, c in terms:
            start = _make("neg", _times(atom, c)) if start is ZERO else _make("sub", start, _times(atom, c))
        return start

    def add(self, a: Node, b: Node) -> Node:
        return self.build(self.cancel_mods(self.linear(a) + self.linear(b)))

    def sub(self, a: Node, b: Node) -> Node:
        return self.build(self.cancel_mods(self.linear(a) - self.linear(b)))

    def offset(self, a: Node, by: int) -> Node:
        return self.build(self.linear(a).plus(by))

    def range_of(self, total: Linear) -> Range:
        """Return the range of the sum over the integers (it may exceed int64)."""
        lo: int | None = total.constant
        hi: int | None = total.constant
        for atom, c in total:
            found = self.ranges.of(atom)
            ends = (found.lo, found.hi) if c > 0 else (found.hi, found.lo)
            lo = None if lo is None or ends[0] is None else lo + c * ends[0]
            hi = None if hi is None or ends[1] is None else hi + c * ends[1]
        return Range(lo, hi)

    # Division.

    def floordiv(self, total: Linear, divisor: int) -> Linear:
        """Return floor(total / divisor) for a positive divisor, the divisible part taken out."""
        if divisor == 1:
            return total
        whole = Linear.of(((a, c // divisor) for a, c in total if c % divisor == 0), total.constant // divisor)
        rest = Linear.of(((a, c) for a, c in total if c % divisor), total.constant % divisor)
        found = self.range_of(rest)
        if found.lo is not None and found.hi is not None and found.lo // divisor == found.hi // divisor:
            return whole.plus(found.lo // divisor)
        return whole + Linear.of([(self._nested_floordiv(rest, divisor), 1)])

    def _nested_floordiv(self, total: Linear, divisor: int) -> Node:
        """Fold (x // a) // b into x // (a * b)."""
        inner = total.atom
        if inner is not None and inner.op == "floordiv" and inner.args[1].op == "const":
            by = int(inner.args[1].attr or 0)
            if by > 0 and by * divisor < 2**62:
                return _make("floordiv", inner.args[0], number(by * divisor))
        return _make("floordiv", self.build(total), number(divisor))

    def ceildiv(self, total: Linear, divisor: int) -> Linear:
        """Return ceil(total / divisor) for a positive divisor."""
        return self.floordiv(total.plus(divisor - 1), divisor)

    def floor_quotient(self, a: Node, divisor: Node) -> Linear:
        """Return floor(a / divisor) for a divisor that is proven positive."""
        by = self.linear(divisor)
        return self.floordiv(self.linear(a), by.constant) if by.is_constant else self._whole("floordiv", a, divisor)

    def product(self, total: Linear, factor: Node) -> Linear | None:
        """Return total * factor; None where that may wrap."""
        by = self.linear(factor)
        if by.is_constant or total.is_constant:
            return total.scaled(by.constant) if by.is_constant else by.scaled(total.constant)
        found = self._whole("mul", self.build(total), factor)
        return None if self.ranges.may_wrap(next(iter(found.terms))) else found

    @staticmethod
    def _whole(op: str, *args: Node) -> Linear:
        return Linear.of([(_make(op, *args), 1)])

    def mod(self, a: Node, divisor: int) -> Node:
        """Return a % divisor for a positive divisor, multiples of the divisor left out."""
        total = self.linear(a)
        rest = Linear.of(((atom, c) for atom, c in total if c % divisor), total.constant % divisor)
        for dividend in (total, rest):
            found = self.range_of(dividend)
            if found.lo is not None and found.hi is not None and found.lo // divisor == found.hi // divisor:
                return self.build(dividend.plus(-(found.lo // divisor) * divisor))
        return _make("mod", self.build(rest), number(divisor))

    # Order.

    def minimum(self, *nodes: Node) -> Node:
        return self._extreme("min", nodes, self.proves_le)

    def maximum(self, *nodes: Node) -> Node:
        return self._extreme("max", nodes, lambda a, b: self.proves_le(b, a))

    def _extreme(self, op: str, nodes: Sequence[Node], wins: Callable[[Node, Node], bool]) -> Node:
        parts = list(dict.fromkeys(part for node in nodes for part in _flatten(op, node)))
        kept: list[Node] = []
        for part in parts:
            if len(parts) > _MAX_COMPARED:
                kept.append(part)
            elif not any(wins(other, part) for other in kept):
                kept = [other for other in kept if not wins(part, other)] + [part]
        kept.sort(key=lambda node: node.op != "const")
        result = kept[0]
        for part in kept[1:]:
            result = _make(op, result, part)
        return result

    def proves_le(self, a: Node, b: Node) -> bool:
        """Return whether a <= b is proven (False says nothing)."""
        lo = self.lower_bound(self.linear(b) - self.linear(a))
        return lo is not None and lo >= 0

    def proves_lt(self, a: Node, b: Node) -> bool:
        lo = self.lower_bound(self.linear(b) - self.linear(a))
        return lo is not None and lo >= 1

    def lower_bound(self, total: Linear) -> int | None:
        """Return a number that the sum is never below, looking into min, max, where, abs and floordiv."""
        key = (total.constant, frozenset(total.terms.items()))
        if key not in self._lower_bounds:
            self._lower_bounds[key] = _LowerBound(self).of(total)
        return self._lower_bounds[key]

    def negative(self, total: Linear) -> Node:
        """Return the condition total < 0 without subtractions; with a number as `x < number` or `number <= x`."""
        lo = self.lower_bound(total)
        if lo is not None and lo >= 0:
            return FALSE
        hi = self.lower_bound(total.scaled(-1))
        if hi is not None and hi >= 1:
            return TRUE
        left = Linear.of((a, c) for a, c in total if c > 0)
        right = Linear.of((a, -c) for a, c in total if c < 0)
        if left.is_constant:
            return self._compare("le", left.plus(total.constant + 1), right)
        if right.is_constant or total.constant != -1:
            return self._compare("lt", left, right.plus(-total.constant))
        return self._compare("le", left, right)

    def _compare(self, op: str, left: Linear, right: Linear) -> Node:
        return make(op, self.build(left), self.build(right), dtype=torch.bool)

    def lt(self, a: Node, b: Node) -> Node:
        return self.negative(self.linear(a) - self.linear(b))

    def le(self, a: Node, b: Node) -> Node:
        return self.negative((self.linear(a) - self.linear(b)).plus(-1))

    def eq(self, a: Node, b: Node) -> Node:
        total = self.linear(a) - self.linear(b)
        found = self.range_of(total)
        if total.is_constant:
            return const(total.constant == 0, torch.bool)
        if (found.lo is not None and found.lo > 0) or (found.hi is not None and found.hi < 0):
            return FALSE
        left = Linear.of((a, c) for a, c in total if c > 0)
        right = Linear.of((a, -c) for a, c in total if c < 0)
        if left.is_constant:
            left, right = right, left.plus(total.constant)
        else:
            right = right.plus(-total.constant)
        return self._compare("eq", left, right)

    # Logic.

    def conjunction(self, *nodes: Node) -> Node:
        return _junction("and", nodes, TRUE, FALSE)

    def disjunction(self, *nodes: Node) -> Node:
        return _junction("or", nodes, FALSE, TRUE)

    def where(self, condition: Node, a: Node, b: Node) -> Node:
        if condition is TRUE or a is b:
            return a
        if condition is FALSE:
            return b
        if condition.op == "not":
            return make("where", condition.args[0], b, a, dtype=a.dtype)
        return make("where", condition, a, b, dtype=a.dtype)

    # Rewriting.

    def rebuild(self, root: Node, replace: Mapping[Node, Node] | None = None) -> Node:
        """Return the expression simplified, after replacing nodes."""
        done: dict[Node, Node] = dict(replace or {})
        for node in topological(root):
            if node not in done:
                done[node] = self._rebuilt(node, tuple(done[arg] for arg in node.args))
        return done[root]

    def _rebuilt(self, node: Node, args: tuple[Node, ...]) -> Node:
        plain = make(node.op, *args, attr=node.attr, dtype=node.dtype)
        if not args:
            return plain
        if (value := folded(plain)) is not None:
            return value
        if node.dtype == torch.bool:
            return self._rebuilt_bool(node.op, args) or self._decided(plain)
        if node.dtype == INDEX_DTYPE:
            return self._rebuilt_index(plain, args) or plain
        return plain

    def _decided(self, node: Node) -> Node:
        found = self.ranges.of(node)
        return const(bool(found.lo), torch.bool) if found.is_exact else node

    def _rebuilt_bool(self, op: str, args: tuple[Node, ...]) -> Node | None:
        match op:
            case "and":
                return self.conjunction(*args)
            case "or":
                return self.disjunction(*args)
            case "not":
                return negation(args[0])
            case "xor" | "ne" if args[0].dtype == torch.bool:
                return _exclusive(*args)
            case "eq" if args[0].dtype == torch.bool:
                return negation(_exclusive(*args))
            case "where":
                return self.where(*args)
            case "cast" if is_integer(args[0]):
                return negation(self.eq(args[0], ZERO))
            case "lt" | "le" | "gt" | "ge" | "eq" | "ne" if is_integer(args[0]):
                return self._rebuilt_comparison(op, *args)
        return None

    def _rebuilt_comparison(self, op: str, a: Node, b: Node) -> Node:
        match op:
            case "lt":
                return self.lt(a, b)
            case "le":
                return self.le(a, b)
            case "gt":
                return self.lt(b, a)
            case "ge":
                return self.le(b, a)
            case "eq":
                return self.eq(a, b)
        return negation(self.eq(a, b))

    def _rebuilt_index(self, plain: Node, args: tuple[Node, ...]) -> Node | None:
        op = plain.op
        divisor = self.linear(args[1]).constant if len(args) == 2 and self.linear(args[1]).is_constant else 0
        floors = op == "floordiv" or (op == "truncdiv" and self.ranges.of(args[0]).non_negative)
        if floors and divisor > 0:
            return self.build(self.floordiv(self.linear(args[0]), divisor))
        match op:
            case "mod" if divisor > 0:
                return self.mod(args[0], divisor)
            case "shr" if 0 < divisor < 62:
                return self.build(self.floordiv(self.linear(args[0]), 1 << divisor))
            case "min":
                return self.minimum(*args)
            case "max":
                return self.maximum(*args)
            case "where":
                return self.where(*args)
            case "abs" if self.ranges.of(args[0]).non_negative:
                return args[0]
            case "load" | "scalar" | "input":
                return plain
        return self.build(self.linear(plain)) if is_integer(args[0]) else plain


class _LowerBound:
    """One search for a lower bound, of bounded effort."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra
        self._steps = _PROOF_STEPS

    def of(self, total: Linear) -> int | None:
        self._steps -= 1
        found = self._algebra.range_of(total).lo
        if self._steps <= 0 or (found is not None and found >= 1):
            return found
        for atom, coefficient in total:
            relaxed = self._relax(total, atom, coefficient)
            if relaxed is not None:
                return relaxed if found is None else max(found, relaxed)
        return found

    def _relax(self, total: Linear, atom: Node, coefficient: int) -> int | None:
        match atom.op, coefficient > 0:
            case ("max", True) | ("min", False):
                return _larger(*(self._with(total, atom, arg) for arg in atom.args))
            case ("min", True) | ("max", False):
                return _smaller(*(self._with(total, atom, arg) for arg in atom.args))
            case "where", _:
                return _smaller(*(self._with(total, atom, arg) for arg in atom.args[1:]))
            case "floordiv", up:
                return self._relax_floordiv(total, atom, up)
        return None

    def _with(self, total: Linear, atom: Node, value: Node) -> int | None:
        return self.of(total.replaced(atom, self._algebra.linear(value)))

    def _relax_floordiv(self, total: Linear, atom: Node, up: bool) -> int | None:
        """x - (m - 1) <= m * (x // m) <= x."""
        divisor = int(atom.args[1].attr or 0) if atom.args[1].op == "const" else 0
        coefficient = total.terms[atom]
        if divisor <= 0 or coefficient % divisor:
            return None
        dividend = self._algebra.linear(atom.args[0]).plus(1 - divisor if up else 0)
        return self.of(total.without(atom) + dividend.scaled(coefficient // divisor))


@functools.lru_cache(maxsize=1 << 14)
def negation(node: Node) -> Node:
    """Return the opposite condition; comparisons of integers flip."""
    if node.op == "const":
        return const(not node.attr, torch.bool)
    if node.op == "not":
        return node.args[0]
    if node.op in _OPPOSITE and not node.args[0].dtype.is_floating_point:
        a, b = node.args
        return make(_OPPOSITE[node.op], *((a, b) if node.op in ("eq", "ne") else (b, a)), dtype=torch.bool)
    return make("not", node, dtype=torch.bool)


# Of an ordering, with its sides swapped.
_OPPOSITE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}


def _make(op: str, *args: Node) -> Node:
    return make(op, *args, dtype=INDEX_DTYPE)


def _as_index(node: Node) -> Node:
    return node if node.dtype == INDEX_DTYPE else make("cast", node, dtype=INDEX_DTYPE)


def _times(atom: Node, coefficient: int) -> Node:
    return atom if coefficient == 1 else _make("mul", atom, number(coefficient))


def _offset(node: Node, constant: int) -> Node:
    if constant == 0:
        return node
    return _make("add", node, number(constant)) if constant > 0 else _make("sub", node, number(-constant))


def _flatten(op: str, node: Node) -> list[Node]:
    parts: list[Node] = []
    stack = [node]
    while stack:
        part = stack.pop()
        if part.op == op:
            stack.extend(reversed(part.args))
        else:
            parts.append(part)
    return parts


def conjuncts(node: Node) -> list[Node]:
    """Return the conditions that an `and` joins; a condition that is no `and` by itself."""
    return _flatten("and", node)


def _junction(op: str, nodes: Sequence[Node], neutral: Node, absorbing: Node) -> Node:
    parts = dict.fromkeys(part for node in nodes for part in _flatten(op, node))
    parts.pop(neutral, None)
    if absorbing in parts or any(negation(part) in parts for part in parts):
        return absorbing
    result, rest = neutral, list(parts)
    first = _chain(op, nodes[0]) if nodes else []
    if first and first == rest[: len(first)]:  # so that a chain of many links is not made anew with each of them
        result, rest = nodes[0], rest[len(first) :]
    for part in rest:
        result = part if result is neutral else make(op, result, part, dtype=torch.bool)
    return result


def _chain(op: str, node: Node) -> list[Node]:
    """Return the parts of a junction that nests to the left alone, as `_junction` makes it; of another one, none."""
    parts: list[Node] = []
    while node.op == op:
        parts.append(node.args[1])
        node = node.args[0]
    return [] if any(part.op == op for part in parts) else [node, *reversed(parts)]


def _exclusive(a: Node, b: Node) -> Node:
    if a is b:
        return FALSE
    if a.op == "const":
        return negation(b) if a.attr else b
    if b.op == "const":
        return negation(a) if b.attr else a
    return make("xor", a, b, dtype=torch.bool)


def _larger(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _smaller(*values: int | None) -> int | None:
    return None if None in values else min(operator.index(value) for value in values if value is not None)
