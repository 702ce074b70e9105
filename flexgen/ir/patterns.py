"""The language of rewrite rules, `sub(x, mod(x, C)) -> mul(floordiv(x, C), C)`: parsing, matching, building.

A lower-case letter matches any value and an upper-case one a constant; the same letter twice, the same value. A
number matches a constant of that value in any dtype, where `0.0` and `-0.0` are different and floating, and 0 and 1
are also False and True. The arguments of a commutative operation match in either order. On the right a number takes
the dtype of the value that is replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from flexgen.ir.graph import Node, const, make
from flexgen.ir.ops import OPS, DtypeRule

Bindings = Mapping[str, Node]

_TOKEN = re.compile(r"[a-z_0-9]+(?=\()|[A-Za-z]\b|-?[0-9.]+|[(),]")


@dataclass(frozen=True, slots=True)
class Call:
    """An operation on patterns."""

    op: str
    args: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A letter: any value, or any constant if it is upper-case."""

    letter: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant of one value."""

    value: int | float


Pattern = Call | Variable | Literal


def parse_rule(text: str) -> tuple[Call, Pattern]:
    """Parse `pattern -> replacement`; the pattern is an operation."""
    left, right = (parse_pattern(side) for side in text.split("->"))
    assert isinstance(left, Call), text
    return left, right


def parse_pattern(text: str) -> Pattern:
    tokens = _TOKEN.findall(text)
    pattern = _parse(tokens)
    assert not tokens, text
    return pattern


def _parse(tokens: list[str]) -> Pattern:
    token = tokens.pop(0)
    if len(token) == 1 and token.isalpha():
        return Variable(token)
    if token not in OPS:
        return Literal(float(token) if "." in token else int(token))
    args: list[Pattern] = []
    while tokens.pop(0) != ")":
        args.append(_parse(tokens))
    assert len(args) == OPS[token].arity, token
    return Call(token, tuple(args))


def match(pattern: Pattern, node: Node, bound: Bindings) -> Iterator[Bindings]:
    """Yield each way in which the pattern matches the node, as letters bound to nodes, `bound` included."""
    match pattern:
        case Literal(value):
            if node.op == "const" and _is_value(node, value):
                yield bound
        case Variable(letter):
            if bound.get(letter, node) is node and (letter.islower() or node.op == "const"):
                yield {**bound, letter: node}
        case Call(op, args):
            if node.op == op:
                yield from _match_args(args, node.args, bound)
                if OPS[op].commutative:
                    yield from _match_args(args, node.args[::-1], bound)


def _match_args(patterns: tuple[Pattern, ...], nodes: tuple[Node, ...], bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for extended in match(patterns[0], nodes[0], bound):
        yield from _match_args(patterns[1:], nodes[1:], extended)


def _is_value(node: Node, value: int | float) -> bool:
    if not isinstance(node.attr, int | float) or node.attr != value:
        return False
    if isinstance(value, float):
        return isinstance(node.attr, float) and math.copysign(1.0, node.attr) == math.copysign(1.0, value)
    return value != 0 or not isinstance(node.attr, float)


def build(pattern: Pattern, bound: Bindings, dtype: torch.dtype) -> Node:
    """Return the replacement for a node of the given dtype."""
    match pattern:
        case Literal(value):
            return const(value, dtype)
        case Variable(letter):
            return bound[letter]
        case Call(op, args):
            nodes = [build(arg, bound, dtype) for arg in args]
            compares = OPS[op].rule is DtypeRule.COMPARE
            return make(op, *nodes, dtype=torch.bool if compares else nodes[-1].dtype)
